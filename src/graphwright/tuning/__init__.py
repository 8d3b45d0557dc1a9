"""Choosing the fastest way that is right: tune(), from the request to the choice and its memory.

Candidates are tried in processes of their own (workers/), in rounds. What a candidate is belongs to
strategies, whether it is right and how fast to evaluation, the result to artifacts. Begin with
tuner.
"""
