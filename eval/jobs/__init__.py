"""Jobs that are accepted while processes are killed, and what became of each."""
