"""Dynamic sizes: which occur, which buckets serve them, and the proof that padding changes nothing.

Graphs and their memory belong to graphs. Begin with buckets, then family and proof.
"""
