"""Faults at random under a live replay, a history of what was seen, and a checker that decides over it.

``python -m tests.chaos`` runs it (``make chaos``). `checker` is a pure function over `history` and knows nothing of how
that came about; its own tests plant each kind of violation.
"""
