"""One `ingero fleet-push`: health and collectives of a node to its Fleet, from probes or from a recording."""
