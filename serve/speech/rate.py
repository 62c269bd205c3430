"""The sample rate of all audio once it has been decoded. Light: nothing is imported for it."""

SAMPLE_RATE = 16_000  # Hz
