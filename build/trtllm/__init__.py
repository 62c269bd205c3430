"""Engines for TensorRT-LLM."""
