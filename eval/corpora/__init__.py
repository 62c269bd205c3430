"""Recordings as people have them, on a disk or a hub -> clips with references."""
