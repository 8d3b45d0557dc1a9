"""The CUDA recorder: CUDA graphs, their memory, streams and driver calls. Begin with recorder."""
