"""Live text, measured: clips streamed as they are spoken, to a real server, several at a time."""
