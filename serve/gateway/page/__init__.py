"""The page for people, at `/`: what browsers load is in `web/`; what it shows of the server."""
