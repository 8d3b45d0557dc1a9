"""graph_step(): one training iteration as one graph. Begin with graphed_step, then builder."""
