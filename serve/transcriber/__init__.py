"""Transcribe many concurrent requests through one runtime."""
