"""What the gateway tells of itself: log, metrics, traces."""
