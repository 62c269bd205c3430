"""Triton Inference Server: started, fed with our models, and called."""
