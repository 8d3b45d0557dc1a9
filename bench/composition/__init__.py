"""graph(fuse(model)) beside tune()'s fused+graph and graph(model)."""
