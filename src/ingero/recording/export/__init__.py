"""Recordings for others' tools: several as one, and as a trace for Perfetto.

Reads recordings read-only and writes only the file that is named.
"""
