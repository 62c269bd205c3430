"""Whisper's token rules: their definition in plain torch, and its twin on the GPU."""
