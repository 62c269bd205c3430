"""The loop between many requests and one runtime."""
