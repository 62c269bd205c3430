"""Jobs: audio that is accepted at once and transcribed later, whatever dies in between."""
