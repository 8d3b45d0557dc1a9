"""Calls whose results and arguments are objects, and models that set attributes."""
