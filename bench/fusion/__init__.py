"""fuse() beside eager, TorchScript and Inductor."""
