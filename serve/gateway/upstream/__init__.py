"""The engines behind the gateway: a Triton of this run for each device."""
