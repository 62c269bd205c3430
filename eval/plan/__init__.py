"""How many GPUs a load needs, and what that costs."""
