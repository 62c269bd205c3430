"""Decoding of audio files in processes of their own: what one makes a library do ends with it."""
