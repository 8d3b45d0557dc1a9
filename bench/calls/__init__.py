"""What answering a call costs beside what answers it."""
