"""A port for a program that must be given its number."""

from ingero.sim.cluster.ports import find_free_ports


def free_port():
    """One of 127.0.0.1 that nobody has, and that the kernel gives to no connection meanwhile."""
    (port,) = find_free_ports(1)
    return port
