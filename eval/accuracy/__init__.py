"""What is heard: systems x clips -> predictions -> scores -> report."""
