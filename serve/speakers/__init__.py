"""Turns of speakers in samples, and words with their speakers."""
