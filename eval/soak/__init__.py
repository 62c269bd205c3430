"""Attack and starve a real server, scenario by scenario; report the limits that it keeps."""

MIXED = "mixed"
SCENARIOS = {
    "short-beside-long": "a short clip beside 20 one-hour files, in 4 GB",
    "large-uploads": "uploads larger than memory",
    "slow-clients": "40 uploads that drip",
    "floods": "floods that need no key, beside a client",
    "killers": "requests that ended or froze servers before",
    "jobs": "jobs while processes are killed",
    "overload": "more requests than a server can do, with a latency target",
    "reload": "engines exchanged under load, some of them bad",
}
"""Titles by name, in the order in which they run."""
