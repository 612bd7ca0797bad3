"""Replaying a recorded step with other durations: who starts later because somebody else took longer.

A worker's operations of a step keep their order. What starts together is one exchange and ends together. A receive
waits for its send; a send waits for its receive, unless the recording shows that it ended before the receive began
(the message was buffered); a collective waits for its last member. Everything else recorded keeps its length:
compute, the gaps between operations, and what a transfer or collective took once everybody was there.

Some waits are not recorded: a worker stands still before an operation until the last of its stage, or of its
replica, has come so far. Such a gap is taken for a wait for whichever of the two came last before it ended.

With the recorded durations this gives the recorded times back, to rounding: `Graph.check` says how nearly.
"""

import numpy as np

from ingero.job_traces.model import TraceRows

COMPUTE = ("forward-compute", "backward-compute")
SAME_START_S = 1e-6
HIDDEN = "hidden-wait"
HIDDEN_GAP_S = 0.05


def scope_of(name):
    """Which ranks an operation synchronises; None for what a worker does alone."""
    exact = {
        "forward-send": "up",
        "forward-recv": "up",
        "backward-send": "down",
        "backward-recv": "down",
        "optimizer-clip-main-grad": "job",
        HIDDEN: "hidden",
    }
    is_collective = name.endswith(("all-reduce", "all-gather", "reduce-scatter", "broadcast"))
    if name in exact or not is_collective or name.startswith("layernorm"):
        return exact.get(name)
    return "embedding" if name.startswith("embedding") else "stage"


def hidden_waits(rows):
    """The rows and, behind them, one of kind HIDDEN before each operation that somebody waited for unrecorded."""
    n_stages = int(rows.stage.max()) + 1
    worker = rows.dp * n_stages + rows.stage
    order = np.lexsort((rows.start_s, worker, rows.step))
    begin = rows.start_s[order]
    _, chain = np.unique(np.stack([rows.step[order], worker[order]]), axis=1, return_inverse=True)
    chain = chain.ravel()
    end = np.maximum.accumulate(begin + rows.duration_s[order] + 1e6 * chain) - 1e6 * chain
    gap = np.zeros(order.size)
    gap[1:] = np.where(np.diff(chain) == 0, begin[1:] - end[:-1], 0.0)
    delayed = np.unique(rows.optype[order][gap >= HIDDEN_GAP_S])
    at = np.flatnonzero(np.isin(rows.optype[order], delayed))
    _, first = np.unique(np.stack([chain[at], rows.optype[order][at]]), axis=1, return_index=True)
    at = at[first]
    which, length = order[at], np.maximum(gap[at], 0.0)
    return TraceRows(
        dp=np.append(rows.dp, rows.dp[which]),
        stage=np.append(rows.stage, rows.stage[which]),
        step=np.append(rows.step, rows.step[which]),
        optype=np.append(rows.optype, np.full(at.size, len(rows.optypes))),
        start_s=np.append(rows.start_s, rows.start_s[which] - length),
        duration_s=np.append(rows.duration_s, length),
        optypes=(*rows.optypes, HIDDEN),
    )


class Graph:
    """The dependencies of a recording, in an order in which they can be worked off.

    Args:
        recorded: The recording.
    """

    def __init__(self, recorded: TraceRows):
        self.recorded = recorded
        self.rows = rows = hidden_waits(recorded)
        self._scope = [scope_of(name) for name in rows.optypes]
        self._is_send = [name.endswith("-send") for name in rows.optypes]
        self._n_stages = int(rows.stage.max()) + 1
        self._group_rows()
        self._meet()
        self._order()

    def _group_rows(self):
        rows = self.rows
        worker = rows.dp * self._n_stages + rows.stage
        is_send = np.array(self._is_send)[rows.optype]
        is_late = (
            np.arange(worker.size) < self.recorded.dp.size
        )  # a hidden wait precedes what it delays
        order = np.lexsort((is_late, ~is_send, rows.start_s, worker, rows.step))
        step, who, start = rows.step[order], worker[order], rows.start_s[order]
        is_together = np.array([scope is not None for scope in self._scope])[rows.optype][order]
        is_new = np.ones(order.size, bool)
        is_new[1:] = (step[1:] != step[:-1]) | (who[1:] != who[:-1])
        is_chain = ~is_new
        is_new[1:] |= (start[1:] - start[:-1] > SAME_START_S) | ~(
            is_together[1:] & is_together[:-1]
        )
        self.block_of = np.empty(order.size, np.int64)
        self.block_of[order] = np.cumsum(is_new) - 1
        first = np.flatnonzero(is_new)
        self.parts = np.split(order, first[1:])
        self.before = np.where(is_chain[first], np.arange(first.size) - 1, -1)
        self.start = np.array([rows.start_s[part].min() for part in self.parts])
        end = rows.start_s + rows.duration_s
        self.end = np.array([end[part].max() for part in self.parts])

    def _meet(self):
        """Which blocks meet: a send with its receive, a collective's members, those whom a hidden wait may be for."""
        keys, counts, rows = {}, {}, self.rows
        for block, part in enumerate(self.parts):
            for row in part.tolist():
                dp, stage = int(rows.dp[row]), int(rows.stage[row])
                for place in self._places(row):
                    nth = counts[place, rows.optype[row], dp, stage] = (
                        counts.get((place, rows.optype[row], dp, stage), -1) + 1
                    )
                    keys.setdefault((place, nth), []).append((block, row))
        self.meetings = [members for members in keys.values() if len(members) > 1]
        self._hidden = {}
        for at, members in enumerate(self.meetings):
            if self._scope[rows.optype[members[0][1]]] == "hidden":
                self._explain_hidden(at, members)

    def _places(self, row):
        """Where an operation meets others: hashable names, equal for those who meet."""
        rows = self.rows
        kind, scope = rows.optypes[rows.optype[row]], self._scope[rows.optype[row]]
        dp, stage, step = int(rows.dp[row]), int(rows.stage[row]), int(rows.step[row])
        away = 0 if kind.endswith("send") else (-1 if scope == "up" else 1)
        link = (scope, step, dp, (stage + away) % self._n_stages)
        return {
            None: (),
            "up": (link,),
            "down": (link,),
            "stage": ((kind, step, stage),),
            "embedding": ((kind, step, dp),),
            "job": ((kind, step),),
            "hidden": (("hidden stage", step, stage), ("hidden replica", step, dp)),
        }[scope]

    def _explain_hidden(self, at, members):
        """Note this meeting for the members whose gap ends soonest after its last arrival."""
        latest = max(float(self.start[block]) for block, _ in members)
        for block, row in members:
            left = float(self.end[block]) - latest
            is_gap = self.rows.duration_s[row] >= HIDDEN_GAP_S
            if is_gap and -1e-3 < left < self._hidden.get(block, (np.inf, -1))[0]:
                self._hidden[block] = (left, at)

    def _order(self):
        """Blocks and meetings in one order, each after what it waits for."""
        rows = self.rows
        end = rows.start_s + rows.duration_s
        self.waits = [[] for _ in self.parts]  # meetings that a block's end waits for
        self.transfer = np.zeros(len(self.meetings))
        enters = [[] for _ in self.parts]
        for at, members in enumerate(self.meetings):
            latest = max(float(self.start[block]) for block, _ in members)
            ends = {block: float(end[row]) for block, row in members}
            for block, row in members:
                is_buffered = (
                    len(members) == 2 and self._is_send[rows.optype[row]] and ends[block] < latest
                )
                is_free = (
                    self._scope[rows.optype[row]] == "hidden"
                    and at != self._hidden.get(block, (0, -1))[1]
                )
                if not is_buffered and not is_free:
                    self.waits[block].append(at)
                enters[block].append(at)
            waiting = [ends[block] for block, _ in members if at in self.waits[block]]
            self.transfer[at] = min(waiting, default=latest) - latest
        self._sort(enters)
        done = np.array([
            max(
                (
                    float(self.transfer[at])
                    + max(float(self.start[b]) for b, _ in self.meetings[at])
                    for at in self.waits[block]
                ),
                default=float(self.start[block]),
            )
            for block in range(len(self.parts))
        ])
        self.own = self.end - done
        previous = np.where(self.before >= 0, self.end[np.maximum(self.before, 0)], 0.0)
        self.gap = self.start - previous

    def _sort(self, enters):
        """Kahn's algorithm over 'block begins', 'meeting complete', 'block ends'."""
        n = len(self.parts)
        missing = np.array([len(members) for members in self.meetings])
        left = np.array([len(waits) for waits in self.waits])
        after = [[] for _ in range(n)]
        for block, before in enumerate(self.before.tolist()):
            if before >= 0:
                after[before].append(block)
        waiters = [[] for _ in self.meetings]
        for block, waits in enumerate(self.waits):
            for at in waits:
                waiters[at].append(block)
        self.plan, ready = [], [b for b in range(n) if self.before[b] < 0]
        while ready:
            block = ready.pop()
            self.plan.append((block, True))
            ending = [] if left[block] else [block]
            for at in enters[block]:
                missing[at] -= 1
                freed = [] if missing[at] else waiters[at]
                left[freed] -= 1
                ending += [other for other in freed if not left[other]]
            self.plan += [(other, False) for other in ending]
            ready += [later for other in ending for later in after[other]]
        if len(self.plan) != 2 * n:
            msg = f"{2 * n - len(self.plan)} of {2 * n} events wait in a circle"
            raise ValueError(msg)

    def replay(self, extra_s, slower=None):
        """Times under other durations.

        Args:
            extra_s: Seconds by which each row lasts longer, shape (n_rows, n_runs): compute, or a transfer's length at
                its receive.
            slower: None, or seconds added to each meeting's transfer, shape (n_meetings, n_runs).

        Returns:
            start_s, duration_s of each row, shape (n_rows, n_runs).
        """
        n, n_runs = len(self.parts), extra_s.shape[1]
        longer = np.zeros((n, n_runs))
        np.add.at(longer, self.block_of[: extra_s.shape[0]], extra_s)
        own = np.maximum(self.own[:, None] + longer, 0.0)
        if slower is None:
            slower = np.zeros((len(self.meetings), 1))
        transfer = self.transfer[:, None] + slower
        start, end = np.zeros((n, n_runs)), np.zeros((n, n_runs))
        members = [[block for block, _ in meeting] for meeting in self.meetings]
        complete = {}
        for block, is_start in self.plan:
            if is_start:
                before = self.before[block]
                start[block] = self.gap[block] + (end[before] if before >= 0 else 0.0)
                continue
            done = start[block]
            for at in self.waits[block]:
                if at not in complete:
                    complete[at] = start[members[at]].max(axis=0) + transfer[at]
                done = np.maximum(done, complete[at])
            end[block] = done + own[block]
        rows, of = self.recorded, self.block_of[: self.recorded.dp.size]
        row_start = start[of]
        late = rows.start_s - self.start[of]
        row_end = end[of]
        early = (self.end[of] - rows.start_s - rows.duration_s)[:, None]
        row_start += late[:, None]
        return row_start, np.maximum(row_end - early - row_start, 0.0)

    def check(self):
        """Greatest difference of a step's length between the recording and its replay without a change, as a share."""
        start, duration = self.replay(np.zeros((self.recorded.dp.size, 1)))
        return self.step_difference(start[:, 0], duration[:, 0])

    def step_difference(self, start_s, duration_s):
        """Greatest relative difference of a step's length from the recorded one."""
        worst = 0.0
        for step in np.unique(self.recorded.step):
            of_it = self.recorded.step == step
            then = (self.recorded.start_s + self.recorded.duration_s)[of_it].max()
            now = (start_s + duration_s)[of_it].max()
            worst = max(worst, abs(now / then - 1.0))
        return worst
