"""Checkpoint -> engine: open published weights, quantise, write the engine folder, verify it."""
