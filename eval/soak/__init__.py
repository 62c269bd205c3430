"""Attack and starve a real server, scenario by scenario; report the limits that it keeps."""

MIXED = "mixed"
SCENARIOS = {
    MIXED: ("mixed.mixed", "clients of every kind, hostile ones and disruptions at once"),
    "short-beside-long": (
        "scenarios.short_beside_long",
        "a short clip beside 20 one-hour files, in 4 GB",
    ),
    "large-uploads": ("scenarios.large_uploads", "uploads larger than memory"),
    "slow-clients": ("scenarios.slow_clients", "40 uploads that drip"),
    "floods": ("scenarios.floods", "floods that need no key, beside a client"),
    "killers": ("scenarios.killers", "requests that ended or froze servers before"),
    "jobs": ("jobs.jobs", "jobs while processes are killed"),
    "overload": ("overload.overload", "more requests than a server can do, with a latency target"),
    "reload": ("reloads.reloads", "engines exchanged under load, some of them bad"),
}
"""The function in this package and the title of each scenario, in the order in which they run."""
