"""How many GPUs a load needs, and their cost."""
