"""Composition: what `ingero trace` and `ingero check` are made of.

The top of the agent: connects probes, discovery and store, owns the loop and its clock, and has no rule of its own about what
a record means.
"""
