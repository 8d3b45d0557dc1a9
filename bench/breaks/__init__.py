"""Calls that a plain capture does not take, as graph() answers them."""
