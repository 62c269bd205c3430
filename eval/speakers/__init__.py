"""Diarization: error rate, number of speakers, speed."""
