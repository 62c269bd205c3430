"""What spreading files over the engines of a Ray cluster costs, beside a plain loop."""
