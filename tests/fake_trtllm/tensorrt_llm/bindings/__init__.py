"""Bindings of the stand-in."""
