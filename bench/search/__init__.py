"""tune() as it is by default on twenty models: how long it takes, and what it misses."""
