"""TensorRT-LLM behind the interface of runtimes."""
