"""A bridge for Home Assistant: the Wyoming protocol in front of a running server.

https://github.com/OHF-Voice/wyoming
"""
