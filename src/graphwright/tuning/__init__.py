"""tune(): the request, the trials, the rounds, the choice and its memory; processes in workers/.

Its result, TunedModule, belongs to artifacts. Begin with tuner.
"""
