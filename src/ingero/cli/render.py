"""Small pieces of text that several commands print alike."""

from __future__ import annotations


def plural(n: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
