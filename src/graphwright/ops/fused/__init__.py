"""Our own fused operators, each with a reference in PyTorch and kernels.

kernels/ holds the kernels, which are imported when they are first called. fused_operator defines an
operator, registry lists all of them, launch_cache saves compiled launches. Rewriting graphs to use
them belongs to fusion. Begin with fused_operator.
"""
