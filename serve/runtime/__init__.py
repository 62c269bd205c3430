"""The interface between a transcriber and what executes an engine, and the table of runtimes."""
