"""fused+graph beside eager+graph on models that nobody has tuned for, chosen by a seed."""
