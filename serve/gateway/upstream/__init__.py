"""The servers behind the gateway: this run's own Triton, and other Earshots."""
