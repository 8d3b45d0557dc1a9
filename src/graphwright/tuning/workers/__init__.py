"""Processes that try one candidate each, with limits on time and memory.

Begin with pool, then worker (one process, seen from the caller's) and fork_server (the process that
workers are forked from). `fork_server_main` is what runs on the other side.
"""
