"""Calls: how they are taken apart, their signature, what they depend on, what they run.

Also how a module's state is watched, kept, put back, described and serialized, and the checks of
what public functions are given (options). Nothing here knows of graphs, strategies or recorders.
Begin with split and signature, then places, dependencies and watch.
"""
