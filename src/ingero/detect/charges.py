"""To whom a worker's waiting is charged.

In a synchronous job what one worker takes beyond its peers is what the others wait, so a culprit's excess
own time since its onset bounds what it can have cost the others: each worker's wait is charged up to the greatest
excess among the culprits of its job, shared in proportion to their excesses (culprits beside each other delay the job
by the greatest, not by the sum). What exceeds that bound, such as a pipeline's own bubbles, stays unattributed.
"""

from __future__ import annotations

from collections.abc import Mapping


def charge_wait(wait_ns: int, worker: int, judged: Mapping[int, int]) -> dict[int, int]:
    """Whom a worker's wait is charged to, worker → nanoseconds; ``judged`` has the excess of each who may be."""
    excess = {other: amount for other, amount in judged.items() if other != worker}
    if not excess:
        return {}
    to_share = min(wait_ns, max(excess.values()))
    total = sum(excess.values())
    shares = {other: to_share * amount // total for other, amount in excess.items()}
    greatest = max(excess, key=lambda other: (excess[other], -other))
    shares[greatest] += to_share - sum(shares.values())
    return {other: share for other, share in shares.items() if share > 0}


def invert_charges(charges: Mapping[int, Mapping[int, int]]) -> dict[int, dict[int, int]]:
    """Who owes each worker: worker → whose wait is charged to it → nanoseconds."""
    owed: dict[int, dict[int, int]] = {}
    for worker, charged in charges.items():
        for other, amount in charged.items():
            owed.setdefault(other, {})[worker] = amount
    return owed
