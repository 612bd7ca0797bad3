"""Recordings made to measure: what a known fault looks like, event by event.

`ingero demo --no-gpu` shows those of `catalog`; tests build further ones on `loop` and `builder`. They go through the
store and the causal engine like any recording; nothing here names a cause.
"""
