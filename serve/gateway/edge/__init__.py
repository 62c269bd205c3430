"""The edge: connections, their limits and headers, and bodies on their way in."""
