"""A data-parallel job whose operations happen as time passes, and of which one rank may be slow."""

import threading
import time

import numpy as np

from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.units import NS_PER_MS

CLUSTER = "chaos"
N_RANKS = 8
OWN_NS = 45 * NS_PER_MS
NOISE = 0.02
FACTOR = 1.5
_COMM = "00000000000000c5"


class Job:
    """Operations of every rank as time passes on this monotonic clock, one of whom may be slow."""

    def __init__(self, seed, mono_ns=time.monotonic_ns):
        self._mono_ns = mono_ns
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._wall_ns = time.time_ns() - mono_ns()
        self._leave_ns = mono_ns()
        self._seq = 0
        self._made = [[] for _ in range(N_RANKS)]
        self.slow = None

    def take(self, rank):
        """A rank's operations since the last time, as a run; None without any."""
        with self._lock:
            while self._leave_ns < self._mono_ns():
                self._step()
            rows, self._made[rank] = self._made[rank], []
        if not rows:
            return None
        who = Rank(CLUSTER, f"node{rank}", rank, 1, (("dp", str(rank)), ("pp", "0")))
        ops = np.array(rows, COLLECTIVE_OP)
        return CollectiveRun(who, _COMM, rank, N_RANKS, ClockKind.DEVICE, ops)

    def _step(self):
        own_ns = OWN_NS * (1 + NOISE * self._random.standard_normal(N_RANKS))
        if self.slow is not None:
            own_ns[self.slow] *= FACTOR
        longest_ns = own_ns.max()
        self._leave_ns += int(longest_ns) + NS_PER_MS
        for rank in range(N_RANKS):
            inside_ns = int(longest_ns - own_ns[rank]) + NS_PER_MS
            entry_ns = self._leave_ns - inside_ns + self._wall_ns
            self._made[rank].append((
                self._seq,
                entry_ns,
                inside_ns,
                int(own_ns[rank]),
                1 << 20,
                CollectiveOp.ALL_REDUCE,
                0,
            ))
        self._seq += 1
