"""Stragglers as events on this node: the local socket, who reads it, and alerts made of it."""
