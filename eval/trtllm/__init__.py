"""Checks that TensorRT-LLM does what this project expects of it."""
