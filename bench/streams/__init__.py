"""Independent branches of a model on several streams, beside one."""
