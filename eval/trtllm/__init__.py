"""Does TensorRT-LLM do what this project expects of it? A table of what ran."""
