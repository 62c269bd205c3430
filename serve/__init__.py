"""Engine -> text: the runtime, the transcriber and the Triton Inference Server around them."""
