"""Recordings made to measure: what a known fault looks like, event by event.

`ingero demo --no-gpu` shows them and every rule's test fires on them. They go through the store and the causal engine
like any recording; nothing here names a cause.
"""
