"""tune() beside PyTorch's own ways to be fast."""
