"""Live text over a WebSocket: audio comes in, and words go out as soon as they are final."""
