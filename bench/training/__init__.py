"""Training steps: graph_step() beside eager and PyTorch's own ways."""
