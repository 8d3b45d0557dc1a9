"""The kernels in Triton. Importing a module of these imports Triton."""
