"""Accuracy: systems x clips -> predictions -> scores -> report."""
