"""A bridge from the Wyoming protocol (Home Assistant) to a running server.

https://github.com/OHF-Voice/wyoming
"""
