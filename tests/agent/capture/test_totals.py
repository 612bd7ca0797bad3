"""Counts of processes that end, and what they become when a number is given again."""

from types import SimpleNamespace

import numpy as np

from ingero.agent.capture.kernel.abi import get_dtype
from ingero.agent.capture.totals import CountReader, Times


class Machine:
    """An engine whose kernel counted what a test says."""

    def __init__(self):
        self.rings, self.mode = {}, SimpleNamespace(value="")
        self.control = SimpleNamespace(keep_one_in=1, set_keep_one_in=lambda _n: None)
        self.state = SimpleNamespace(
            read_losses=dict,
            read_unwinding=dict,
            read_in_flight=lambda: np.zeros(0, get_dtype("count_key")),
            read_copies=lambda: np.zeros(0, get_dtype("count")),
            forget=lambda _pids: None,
        )


def rows_of(pid, n_seen):
    keys, counts = np.zeros(1, get_dtype("count_key")), np.zeros(1, get_dtype("count"))
    keys["pid"], counts["seen"] = pid, n_seen
    return keys, counts


def test_a_process_that_gets_the_number_of_one_that_ended_counts_from_nothing():
    reader = CountReader(Machine(), 1)

    def change(rows):
        totals = reader.build(rows, Times(0, 0, 0), 0, (), is_last=False)
        return totals.changes["seen"].tolist()

    ended = rows_of(7, 1000)
    assert change(ended) == [1000]
    reader.forget([7], *ended)
    assert change(rows_of(7, 5)) == [5]
    assert change(rows_of(7, 9)) == [4]
