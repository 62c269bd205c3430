"""The gateway's cost: throughput beside that straight to Triton, and idle connections."""
