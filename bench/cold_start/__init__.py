"""Seconds from the start of a process to its first right answer."""
