"""The sample rate of decoded audio, in a module without imports."""

SAMPLE_RATE = 16_000  # Hz
