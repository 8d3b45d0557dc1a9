"""Is it right, and how fast: a candidate's answers against eager's, and its time.

The float64 reference and variations of a sample, the verdict on an answer, the rules of accuracy,
and measurement in turns. Candidates belong to strategies, processes to try them in to tuning.
Begin with reference, then verification and measurement.
"""
