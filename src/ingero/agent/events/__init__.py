"""Stragglers as events on this node: the local socket, its readers, and alerts."""
