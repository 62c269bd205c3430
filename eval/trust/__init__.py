"""Transcripts and words that can be trusted: agreement of two searches, and calibration."""
