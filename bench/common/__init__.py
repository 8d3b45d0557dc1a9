"""What several benchmarks share: timing, peers, processes, and results as files and tables."""
