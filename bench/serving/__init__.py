"""Servers under load: how much each answers, how late, and whether every answer is right."""
