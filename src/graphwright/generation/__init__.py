"""graph_generate() and decode(): loops that make one token after another, as a few graphs.

launches.py runs any step, several times in one graph; decoding.py does so for a step function of
one's own, generator.py for the models of transformers, whose caches and logits processors become
static in static_cache.py and processors.py. Capturing belongs to dispatch. Begin with launches,
then generator.
"""
