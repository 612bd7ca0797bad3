"""What was seen in a run, as plain events: nothing of how it came about, and nothing concluded.

Times are seconds on one monotonic clock, that of the program that recorded them.
"""

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Slowed:
    """Rank ``rank`` was made slow from ``start_s`` to ``end_s``."""

    rank: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Verdict:
    """A record of a changed verdict, in the order of their times; ``at_s`` is what the record says."""

    rank: int
    kind: str
    before: str
    at_s: float


@dataclass(frozen=True)
class Threshold:
    """An answer to node ``node`` with a threshold."""

    node: int
    at_s: float
    value: float


@dataclass(frozen=True)
class Fault:
    """What was done to what, until when."""

    kind: str
    target: str
    start_s: float
    end_s: float


@dataclass
class History:
    """A run.

    Attributes:
        start_s: Of what is checked.
        end_s: Of it.
        slowed: What was injected.
        verdicts: What came out.
        thresholds: What nodes were answered.
        faults: What was done.
        acknowledged: By writer, numbers of the rows of which it was told that they are taken.
        stored: By writer, numbers of the rows that were found in the end.
        n_nodes: Nodes that ask for thresholds.
    """

    start_s: float = 0.0
    end_s: float = 0.0
    n_nodes: int = 0
    slowed: list[Slowed] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    thresholds: list[Threshold] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    acknowledged: dict[str, list[int]] = field(default_factory=dict)
    stored: dict[str, list[int]] = field(default_factory=dict)


def write_history(history, path):
    """As one JSON document."""
    path.write_text(json.dumps(asdict(history)), encoding="utf-8")


def read_history(path):
    """What `write_history` wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    lists = {"slowed": Slowed, "verdicts": Verdict, "thresholds": Threshold, "faults": Fault}
    return History(**{
        name: [lists[name](**one) for one in value] if name in lists else value
        for name, value in found.items()
    })
