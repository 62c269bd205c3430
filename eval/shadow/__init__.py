"""The shadow monitor, measured: after how many requests does it find a broken engine?"""
