"""make_graphed_callables(): forward and backward as graphs. Begin with graphed_callables."""
