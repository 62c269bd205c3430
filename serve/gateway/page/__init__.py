"""The page for people, at `/`: its files lie in `web/`, and it shows the state of the server."""
