"""Which architectures of transformers take buckets, on the CPU."""
