"""The capture engine: two recorders under one contract, memory pools, capture()."""
