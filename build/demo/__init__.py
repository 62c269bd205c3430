"""The demo checkpoint: a small Whisper trained from scratch on synthesised English and Spanish.

`checkpoint/` is all that is needed to use it, `draft/` a second decoder for it; `maker/` made both.
"""
