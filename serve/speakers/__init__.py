"""Diarize recordings, and assign words to speakers."""
