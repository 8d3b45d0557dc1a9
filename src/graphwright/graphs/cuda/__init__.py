"""The recorder of GPUs: CUDA graphs, their memory, streams, driver. Begin with recorder."""
