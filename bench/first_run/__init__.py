"""What a new user gets: the command `graphwright tune` on a machine where nothing was built."""
