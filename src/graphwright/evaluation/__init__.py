"""Is it right, and how fast: answers against eager's and float64's, and time, in turns.

The reference, variations of a sample, the rules of accuracy, the verdict, and measurement.
Candidates belong to strategies, the processes that try them to tuning. Begin with reference, then
verification and measurement.
"""
