"""Whisper's token rules: the reference implementation in plain torch, and Triton kernels."""
