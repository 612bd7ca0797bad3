"""The probes: what can be watched, attached and read as arrays.

Above `symbols` and `discover`. Owns the loaded objects and their maps; decides nothing about storage or output.
"""
