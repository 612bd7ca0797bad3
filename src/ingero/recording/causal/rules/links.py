"""The way between the ranks is slow: collectives take long after everybody has arrived.

The last rank to arrive waits for nobody, so its time inside is the transfer. It is compared with the same operation and
size before, and in other communicators; TCP retransmits are the cause where the hit operations are the slow ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray, IntArray
from ingero.model.incidents import RuledOut
from ingero.model.operations import OpKind
from ingero.recording.causal.attribution import NAMED_SHARE
from ingero.recording.causal.evidence import EventRows, Evidence, remembered
from ingero.recording.causal.finding import Contrast, Finding, name_cause, rule
from ingero.recording.causal.rules.collectives import MEETINGS
from ingero.recording.causal.rules.groups import MIN_OPS, Group, find_groups
from ingero.units import NS_PER_MS, format_duration, format_size

_RATIO: Final = 2.0
_MIN_EXTRA_NS: Final = NS_PER_MS
_QUIET_PCT: Final = 20
_MIN_SLOW: Final = 10
_MIN_BUNCHED: Final = 0.60
_MIN_LOST_NS: Final = 20 * NS_PER_MS
_MIN_LOST_SHARE: Final = 0.05
_MIN_PEERS: Final = 2
_MIN_HIT: Final = 5
_MIN_RESPONSE: Final = 1.5
_MAX_PEERS: Final = 3
_LOOPBACK: Final = 127


@dataclass(frozen=True, slots=True)
class _Transfers:
    """Operations of one communicator, one kind and one size class.

    Attributes:
        group: With their times inside known.
        transfer_ns: Time inside of the last to arrive, shape (operations,).
        key: Kind and size class: what may be compared.
    """

    group: Group
    transfer_ns: IntArray
    key: tuple[int, int]

    @property
    def least_ns(self) -> float:
        """Lost time below which nothing is said."""
        entries = self.group.entries_ns
        return max(_MIN_LOST_NS, _MIN_LOST_SHARE * float(entries[0].max() - entries[0].min()))

    @property
    def op(self) -> str:
        process, code = self.group.processes[0], self.key[0]
        return process.calls.where(process.calls.codes == code).op


@remembered
def _find_transfers(evidence: Evidence) -> list[_Transfers]:
    found = []
    for group in find_groups(evidence):
        timed = group.timed()
        sizes = np.log2(np.maximum(timed.n_bytes[0], 1)).astype(np.int64)
        for code, size in sorted(set(zip(timed.codes[0].tolist(), sizes.tolist(), strict=True))):
            same = timed.at((timed.codes[0] == code) & (sizes == size))
            if len(same.seqs) >= MIN_OPS:
                found.append(_Transfers(same, same.inside_ns.min(axis=0), (code, size)))
    return found


@rule("tcp_retransmits", "Collectives are slow when TCP segments are sent again", MEETINGS)
def tcp_retransmits(evidence: Evidence) -> list[Finding]:
    """Collectives that are slow exactly when segments were sent again."""
    return [f for one in _find_transfers(evidence) if (f := _judge_retransmits(evidence, one))]


def _on_path(evidence: Evidence, one: _Transfers) -> EventRows:
    """Retransmits of these collectives: on a member's node, of no other process, on loopback only of a member."""
    sent_again = evidence.rows.of(OpKind.RETRANSMIT)
    nodes = sorted({process.node for process in one.group.processes})
    is_member = np.isin(evidence.column("node", sent_again), nodes)
    pids = evidence.column("pid", sent_again)
    is_theirs = np.isin(pids, [0, *(process.pid for process in one.group.processes)])
    remote = evidence.column("arg0", sent_again) & 0xFFFF_FFFF
    is_loopback = remote >> 24 == _LOOPBACK
    is_named = is_theirs & (pids != 0)
    return sent_again.where(is_member & is_theirs & (~is_loopback | is_named))


def _hits(evidence: Evidence, one: _Transfers) -> IntArray:
    """Retransmits during each operation, on the nodes of its members and by their clocks; shape (operations,)."""
    sent_again = _on_path(evidence, one)
    nodes = evidence.column("node", sent_again)
    hits = np.zeros(len(one.group.seqs), np.int64)
    for i, process in enumerate(one.group.processes):
        moments = sent_again.starts[nodes == process.node]
        starts = one.group.entries_ns[i]
        ends = starts + one.group.inside_ns[i]
        mine = np.searchsorted(moments, ends) - np.searchsorted(moments, starts)
        hits = np.maximum(hits, mine)
    return hits


def _judge_retransmits(evidence: Evidence, one: _Transfers) -> Finding | None:
    hits = _hits(evidence, one)
    is_hit = hits > 0
    response = Contrast.of(one.transfer_ns, is_hit, _MIN_HIT)
    if response is None:
        return None
    hit, free = response.hit_ns, response.free_ns
    lost_ns = round(response.extra_ns(one.transfer_ns[is_hit]))
    share = lost_ns / max(response.extra_ns(one.transfer_ns), 1.0)
    is_response = hit >= max(_MIN_RESPONSE * free, free + _MIN_EXTRA_NS)
    if not is_response or lost_ns < one.least_ns or share < NAMED_SHARE:
        return None
    return Finding(
        title=(
            f"TCP retransmits slow {int(is_hit.sum())} of {len(hits)} collectives: {format_duration(hit)} instead of "
            f"{format_duration(free)}"
        ),
        span_ns=_span(one.group.at(is_hit)),
        lost_ns=lost_ns,
        causes=name_cause(
            "TCP retransmits on the collective's path",
            share,
            f"{int(hits.sum())} segments sent again during {response.n_hit} collectives{_peers(evidence, one)}",
            f"{one.op}: {response.format()} (medians)",
            "counted from the last rank's arrival, so nobody's lateness is in it",
        ),
        process=one.group.processes[0],
        others=one.group.processes,
        op=one.op,
        n_cases=int(is_hit.sum()),
        fix=(
            "look at the link: ethtool -S, switch port errors, MTU on both ends",
            "make sure that NCCL takes the interface it should: NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE",
        ),
    )


def _peers(evidence: Evidence, one: _Transfers) -> str:
    """Where most segments were sent again to, IPv4 as the probe packs it."""
    remote = evidence.column("arg0", _on_path(evidence, one)) & 0xFFFF_FFFF
    remote = remote[remote != 0]
    if not len(remote):
        return ""
    addresses, counts = np.unique(remote, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:_MAX_PEERS]
    texts = (".".join(str(a >> s & 0xFF) for s in (24, 16, 8, 0)) for a in addresses[most].tolist())
    return ", to " + ", ".join(texts)


@rule("slow_link", "Collectives take long after the last rank has arrived", MEETINGS)
def slow_link(evidence: Evidence) -> list[Finding]:
    """Transfers that take twice as long as before, or as in the other communicators."""
    every = _find_transfers(evidence)
    return [f for one in every if (f := _judge_link(evidence, one, _typical_elsewhere(one, every)))]


def _typical_elsewhere(one: _Transfers, every: list[_Transfers]) -> float | None:
    """Median transfer of the same operation in other communicators, when there are enough of them."""
    others = [
        float(np.median(other.transfer_ns))
        for other in every
        if other.key == one.key and other.group.comm != one.group.comm
    ]
    return float(np.median(others)) if len(others) >= _MIN_PEERS else None


def _judge_link(evidence: Evidence, one: _Transfers, elsewhere: float | None) -> Finding | None:
    before = float(np.percentile(one.transfer_ns, _QUIET_PCT))
    is_sibling = elsewhere is not None and before > max(
        _RATIO * elsewhere, elsewhere + _MIN_EXTRA_NS
    )
    typical = elsewhere if is_sibling and elsewhere is not None else before
    is_slow = one.transfer_ns > max(_RATIO * typical, typical + _MIN_EXTRA_NS)
    at = np.flatnonzero(is_slow)
    if len(at) < _MIN_SLOW or len(at) < _MIN_BUNCHED * (at[-1] - at[0] + 1):
        return None
    extra = np.clip(one.transfer_ns - typical, 0, None)
    lost_ns = round(float(extra[is_slow].sum()))
    if lost_ns < one.least_ns or _judge_retransmits(evidence, one) is not None:
        return None
    against = "in the other communicators" if is_sibling else "otherwise"
    return _describe_link(evidence, one, is_slow, (typical, against, lost_ns))


def _describe_link(
    evidence: Evidence,
    one: _Transfers,
    is_slow: BoolArray,
    facts: tuple[float, str, int],
) -> Finding:
    typical, against, lost_ns = facts
    slow_ns = float(np.median(one.transfer_ns[is_slow]))
    n_bytes = int(np.median(one.group.n_bytes[0][is_slow]))
    nodes = sorted({evidence.recording.nodes[p.node] for p in one.group.processes} - {""})
    who = f"ranks {', '.join(map(str, one.group.ranks))}" + (
        f" on {', '.join(nodes)}" if nodes else ""
    )
    rates = f"{n_bytes / max(slow_ns, 1):.2f} GB/s instead of {n_bytes / max(typical, 1):.2f} GB/s"
    n_hit = int((_hits(evidence, one)[is_slow] > 0).sum())
    return Finding(
        title=(
            f"Slow link: {one.op} of {format_size(n_bytes)} takes {format_duration(slow_ns)} after the last "
            f"rank arrived, "
            f"{format_duration(typical)} {against}"
        ),
        span_ns=_span(one.group.at(is_slow)),
        lost_ns=lost_ns,
        causes=name_cause(
            "slow transfer between the ranks of one communicator",
            1.0,
            who,
            f"{int(is_slow.sum())} of {len(is_slow)} operations, {rates}",
        ),
        process=one.group.processes[0],
        others=one.group.processes,
        op=one.op,
        n_cases=int(is_slow.sum()),
        ruled_out=(
            RuledOut("a late rank", 0.0, "counted from the last rank's arrival"),
            RuledOut(
                "TCP retransmits",
                round(n_hit / int(is_slow.sum()), 4),
                f"seen during {n_hit} of the slow ones",
            ),
        ),
        fix=(
            (
                "compare link state and counters on these nodes: ibstat, ethtool -S, nvidia-smi nvlink -s, lspci "
                "width and speed"
            ),
            "run nccl-tests between the pairs of nodes to find the link",
        ),
    )


def _span(group: Group) -> tuple[int, int]:
    return int(group.entries_ns[0].min()), int((group.entries_ns[0] + group.inside_ns[0]).max())
