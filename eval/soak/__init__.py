"""What survives: a real server, attacked and starved, scenario by scenario."""
