"""Live text: audio over a WebSocket in, words as soon as they are final out."""
