"""profile() beside what its remedies then gain."""
