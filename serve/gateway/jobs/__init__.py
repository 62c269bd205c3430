"""Jobs: requests that are accepted at once and answered later. They survive any process."""
