"""prefetch() beside a plain loop and PyTorch's own pinned copies."""
