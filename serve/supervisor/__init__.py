"""Triton and its gateway as one server: started, watched, started again, drained and stopped."""
