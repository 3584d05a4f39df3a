"""The commands of `fedbn`, one module each: `add` adds a command's arguments, and `cli` calls its function.

The modules are imported at each start: what is large is imported inside functions.
"""
