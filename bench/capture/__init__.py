"""capture() and graph() beside eager, a capture by hand and PyTorch's own ways to one."""
