"""Calls that one graph cannot hold: divided into a tree of graphs where the host reads values.

Begin with tree, which holds a call's segments. tracer and observation find where a call breaks,
recording records the segments.
"""
