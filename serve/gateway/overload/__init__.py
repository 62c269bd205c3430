"""A latency target, and what is let in so that it is kept."""
