"""Calls that graph() has to refuse, beside eager."""
