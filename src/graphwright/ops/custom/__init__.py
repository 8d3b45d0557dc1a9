"""The user's own operators: C++, CUDA and Triton, built once. Begin with extension."""
