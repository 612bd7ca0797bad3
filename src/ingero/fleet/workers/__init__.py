"""Receiving in several processes: what passes between a worker and the judge, and both ends of it.

`messages` is what they say, `pool` the judge's end, `link` a worker's. Below the receivers, which join the pool in the
judge and ask the link in a worker; `ingero.fleet.worker` is the process. See ``docs/decisions/0068``.
"""
