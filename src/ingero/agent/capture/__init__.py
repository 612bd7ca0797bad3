"""From the kernel to rows of events: probes, stacks, devices, and the session that reads them.

Knows nothing of recordings, Fleet or metrics: whoever wants the rows is an observer of the session.
"""
