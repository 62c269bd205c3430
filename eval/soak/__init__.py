"""A real server, attacked and starved, scenario by scenario: what survives?"""
