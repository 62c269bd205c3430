"""Turns of speakers: how right they are, and what they cost, beside those of peers."""
