"""Whole programs: what people already run, with modules somewhere inside.

`inspector.py` runs a program on sample calls and says which of its modules are called, how, and
which could be tuned or captured. Read `observed_calls.py` first. What is done to one module alone
belongs to `tuning`, `dispatch` and `generation`.
"""
