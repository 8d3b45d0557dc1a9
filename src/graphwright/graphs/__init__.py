"""The capture engine. For now one plain recorder: a CUDA graph for one call's shapes."""
