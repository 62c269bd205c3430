"""The messages between a run's processes, and the client that asks them."""
