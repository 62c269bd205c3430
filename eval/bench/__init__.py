"""Speed: figures beside what the machine could do at best, and beside peers."""
