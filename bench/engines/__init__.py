"""Other engines beside eager, in one table."""
