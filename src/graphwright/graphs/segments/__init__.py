"""Calls that one graph cannot hold: traced, cut where the host has a say, joined by what it saw.

Begin with tree, which holds a call's segments; tracer and observation find where to cut.
"""
