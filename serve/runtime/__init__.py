"""The interface between the transcriber and the runtimes that execute engines."""
