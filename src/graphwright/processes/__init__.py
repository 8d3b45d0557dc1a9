"""Processes beside the caller's: started, watched and ended in one way. What they do is not here.

Begin with child; process has what both sides need of Linux.
"""
