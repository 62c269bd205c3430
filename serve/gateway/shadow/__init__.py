"""The shadow monitor: a reference answers some requests again, and the answers are compared."""
