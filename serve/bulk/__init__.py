"""Transcribe many files on many engines with Ray Data, from a folder or an object store."""
