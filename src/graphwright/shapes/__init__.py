"""Sizes of dynamic dimensions: which occur, and which graphs are captured for them."""
