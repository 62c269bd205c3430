"""How many GPUs a load needs, what that costs, and what autoscaling makes of a day."""
