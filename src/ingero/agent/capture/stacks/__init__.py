"""Recorded stacks into words: CPython frames with the line being executed, native frames with their symbols.

Above `discover` and `kernel`, below `probes`. Reads memory and files of the traced processes and executes nothing of
theirs; what cannot be checked is left out, never guessed.
"""
