"""Ingero: which rank of a GPU cluster is slow, why, who waited for it, and what it cost."""

__version__ = "0.1.0"
