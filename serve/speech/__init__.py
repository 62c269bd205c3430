"""Convert between bytes, samples, log-mel, windows, token ids and text."""
