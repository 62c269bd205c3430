"""Peers on the same GPU, told the same lengths."""
