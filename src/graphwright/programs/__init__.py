"""Whole programs: what people already run, with modules somewhere inside.

`inspector.py` runs a program on sample calls and says which of its modules are called, how, and
which could be tuned or captured; read `observed_calls.py` first. `acceleration.py` tunes these
modules in place and keeps what pays end to end; read `installation.py` first. What is done to one
module alone belongs to `tuning`, `dispatch` and `generation`.
"""
