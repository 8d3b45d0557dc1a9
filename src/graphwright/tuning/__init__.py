"""tune(): try every candidate, choose the fastest whose results are right, cache the choice.

Candidates are tried in processes of their own (workers/). Strategies says what a candidate is,
evaluation whether it is right and how fast, and artifacts holds the result. Begin with tuner.
"""
