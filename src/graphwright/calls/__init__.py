"""What a call is, before anything captures or measures it.

Its signature, the module behind it and all that the call depends on, how that is watched, kept and
put back, how a call is written down, and what an operation of ATen reads and writes. Nothing here
knows of graphs, strategies or recorders. Begin with signature, then dependencies and watch.
"""
