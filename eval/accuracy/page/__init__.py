"""A run's report, or two of them, as one web page that needs nothing else."""
