"""Our own fused operators: a reference in PyTorch beside each kernel.

kernels/ holds the kernels, of which nothing is imported before it is called; fused_operator defines
an operator, registry lists them, launch_cache keeps compiled launches. Rewriting graphs to use them
belongs to fusion. Begin with fused_operator.
"""
