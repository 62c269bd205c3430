"""Start, watch, restart, drain and stop Triton and its gateway as one server."""
