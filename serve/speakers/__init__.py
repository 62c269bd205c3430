"""Who speaks when: turns of speakers in samples, and words with their speakers."""
