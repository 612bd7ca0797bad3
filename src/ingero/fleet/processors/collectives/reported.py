"""How reports about collectives are remembered in a `ReportLedger`: what each is about, and what it says.

Verdicts that say nothing are not remembered: the next judge tells a change against none, which is no report either.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

from ingero.fleet.processors.collectives.conclusions import QUIET, VerdictChange
from ingero.model.collectives import Worker
from ingero.model.hang import HangCause, HangRoot, StoppedGroup
from ingero.model.verdicts import VerdictKind

_VERDICT: Final = "verdict "
_HANG: Final = "hang "
_COST: Final = "cost"


def describe_changes(changes: Iterable[VerdictChange]) -> dict[str, str | None]:
    """What records of these changes say."""
    reported: dict[str, str | None] = {}
    for change in changes:
        if not change.is_quiet:
            kind = change.verdict.kind
            about = _VERDICT + json.dumps(change.verdict.rank.worker)
            reported[about] = None if kind in QUIET else kind.value
    return reported


def read_reported(reported: Mapping[str, str]) -> dict[Worker, VerdictKind]:
    """The verdicts among what was said; a kind that this release does not know is left out."""
    found = {}
    for about, state in reported.items():
        if about.startswith(_VERDICT):
            with suppress(ValueError):
                found[Worker(*json.loads(about.removeprefix(_VERDICT)))] = VerdictKind(state)
    return found


def describe_costs(place_ns: int) -> dict[str, str | None]:
    """What a report of costs says: up to which cut of the log it goes."""
    return {_COST: str(place_ns)}


def read_cost_mark(reported: Mapping[str, str]) -> int:
    """The last cut that was reported; 0 where no release that cuts has reported costs."""
    with suppress(ValueError):
        return int(reported.get(_COST, "0"))
    return 0


def _name_hang(root: HangRoot) -> str:
    return _HANG + json.dumps([root.rank, root.group.name, root.missing_seq])


def describe_hangs(began: Iterable[HangRoot], ended: Iterable[HangRoot]) -> dict[str, str | None]:
    """What records of these hangs say, with what else their ends have to say."""
    reported: dict[str, str | None] = dict.fromkeys(map(_name_hang, ended))
    return reported | {
        _name_hang(root): json.dumps([root.node_id, root.job, root.cause.value]) for root in began
    }


def read_hangs(reported: Mapping[str, str]) -> list[HangRoot]:
    """The hangs among what was said that have not ended, as far as these matter at their ends.

    What another release wrote otherwise is left out.
    """
    found = []
    for about, state in reported.items():
        if about.startswith(_HANG):
            with suppress(ValueError):
                rank, comm, missing_seq = json.loads(about.removeprefix(_HANG))
                node_id, job, cause = json.loads(state)
                where = StoppedGroup(comm, ())
                found.append(
                    HangRoot(rank, HangCause(cause), where, missing_seq, None, (), node_id, job)
                )
    return found
