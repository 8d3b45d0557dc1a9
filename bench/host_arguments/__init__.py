"""A model on a GPU, some of whose arguments are on the host."""
