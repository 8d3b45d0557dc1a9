"""Is a candidate right, and how fast is it: comparison with eager and float64, and timing.

Candidates belong to strategies, the processes that try them to tuning. Begin with reference, then
verification and measurement.
"""
