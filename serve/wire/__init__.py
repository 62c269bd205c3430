"""What the processes of a run say to each other, and how clients ask them."""
