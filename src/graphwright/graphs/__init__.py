"""The capture engine: what a call does, recorded once and replayed.

Two recorders under one contract (cpu/, cuda/), memory pools, the transaction around a capture, and
calls in segments where the host has a say (segments/). Which call is captured when, and which graph
answers it, belong to dispatch. Begin with capture, then captured_call and transaction.
"""
