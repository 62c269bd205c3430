"""Where the time of a fixed load goes: by phase and by kernel, and where the device is idle."""
