"""From the kernel to rows of events: probes, stacks, devices, and the session that reads them.

Knows nothing of recordings, Fleet or metrics: who wants the rows adds an observer of the session.
"""
