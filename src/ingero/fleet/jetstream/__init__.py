"""Several Fleets as one: pushes meet in a stream of NATS JetStream, and one Fleet judges a cluster at a time.

A receiver answers a push when the stream has it. The Fleet that holds a cluster's lease reads the stream from its
beginning, so that it knows what its predecessor knew, and reports from where that one ended. `site` is what the service
starts.
See ``docs/decisions/0072``.
"""
