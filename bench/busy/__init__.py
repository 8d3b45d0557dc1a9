"""tune() on a machine that is busy with other work."""
