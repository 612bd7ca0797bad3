"""Collectives of this node: as the host calls them, as the device ran them, and their way to Fleet."""
