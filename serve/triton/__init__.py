"""The model that runs inside Triton Inference Server."""
