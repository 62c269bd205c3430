"""A real server, attacked and starved, scenario by scenario, and what it survives."""
