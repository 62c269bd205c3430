"""The messages between the processes of a run, and the client of the server."""
