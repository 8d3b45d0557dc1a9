"""What a call is and depends on: signature, module, state, and the operations it runs.

Also how all that is watched, kept, put back, and written down. Nothing here knows of graphs,
strategies or recorders. Begin with signature, then dependencies and watch.
"""
