"""The gateway's log, metrics and traces."""
