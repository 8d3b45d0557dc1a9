"""What check() predicts of each model, and what a plain capture then does."""
