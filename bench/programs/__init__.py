"""Whole programs, accelerated in place."""
