"""Decode each audio file in its own sandboxed process, so that a malicious file harms no other."""
