"""graph(buckets=…): a model over batch × length, and what padding costs."""
