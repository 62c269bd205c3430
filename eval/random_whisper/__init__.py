"""Whispers of any published shape with random weights, as checkpoints and as engines."""
