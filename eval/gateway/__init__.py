"""What the gateway costs: throughput beside that straight to Triton, and idle connections."""
