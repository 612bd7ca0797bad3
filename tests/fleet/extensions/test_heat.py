"""The matrix behind the live page's heat map: which level a client sees of which rank at which moment."""

import json
import struct

import numpy as np
import pytest

from ingero.fleet.component import RankColumn, RankMeasure
from ingero.fleet.extensions.ingero_threshold import heat
from ingero.fleet.extensions.ingero_threshold.heat import N_COLUMNS, HeatHistory
from ingero.fleet.extensions.ingero_threshold.live import _NUMBER
from ingero.testing.clock import ManualClock

SECOND = 10**9
UNKNOWN = 255


class Measured:
    """A component that measures what it is given."""

    measure = RankMeasure("score", "Score", 1.0, 0.0, "nodes")

    def __init__(self, **columns):
        self.columns = columns
        self.n_reads = 0

    def read_levels(self):
        self.n_reads += 1
        return {
            name: RankColumn(list(levels), bytes(levels.values()))
            for name, levels in self.columns.items()
        }


class Watcher:
    """What a page knows after each answer: {row: [levels, oldest first]}."""

    def __init__(self, history, source):
        self.history, self.source = history, source
        self.head, self.kept = {"taken": 0, "version": 0}, np.zeros((0, 0), np.uint8)
        self.n_bytes = 0

    def look(self, cluster="c"):
        after, version = self.head["taken"], self.head["version"]
        answer = self.history.encode(self.source, cluster, after, version)
        (length,) = struct.unpack_from("<I", answer)
        self.head = json.loads(answer[4 : 4 + length])
        self.n_bytes = len(answer)
        columns = np.frombuffer(answer[4 + length :], np.uint8).reshape(-1, self.head["n_rows"])
        assert len(columns) == len(self.head["walls_s"])
        if "names" in self.head:
            self.names, self.kept = self.head["names"], columns[:-1]
        else:
            self.kept = np.vstack([self.kept, columns[:-1]])[-N_COLUMNS:]
        whole = np.vstack([self.kept, columns[-1:]])
        return {name: whole[:, row].tolist() for row, name in enumerate(self.names)}


@pytest.fixture
def clock():
    return ManualClock(wall_ns=1_000 * SECOND)


@pytest.fixture
def history(clock):
    return HeatHistory(clock, 5 * SECOND)


def step(clock, history, source, **columns):
    clock.advance(5 * SECOND)
    source.columns = columns
    history.take([source])


def test_a_page_gets_the_past_once_and_then_what_is_new(clock, history):
    source = Measured()
    step(clock, history, source, c={"n1": 10, "n2": 20})
    step(clock, history, source, c={"n1": 11, "n2": 21})
    page = Watcher(history, source)
    assert page.look() == {"n1": [10, 11, 11], "n2": [20, 21, 21]}
    assert page.head["walls_s"] == [1005, 1010, 1010]
    clock.advance(SECOND)
    source.columns = {"c": {"n1": 99, "n2": 22}}
    assert page.look() == {"n1": [10, 11, 99], "n2": [20, 21, 22]}
    assert page.head["walls_s"] == [1011]
    step(clock, history, source, c={"n1": 12, "n2": 23})
    assert page.look() == {"n1": [10, 11, 12, 12], "n2": [20, 21, 23, 23]}
    assert "names" not in page.head


def test_ranks_that_come_go_and_change_places_keep_their_rows(clock, history):
    source = Measured()
    page = Watcher(history, source)
    step(clock, history, source, c={"node10": 1, "node9": 2})
    page.look()
    step(clock, history, source, c={"node2": 5, "node9": 4})
    found = page.look()
    assert found == {
        "node2": [UNKNOWN, 5, 5],
        "node9": [2, 4, 4],
        "node10": [1, UNKNOWN, UNKNOWN],
    }
    assert list(found) == ["node2", "node9", "node10"]


def test_only_the_newest_columns_are_kept_and_a_page_that_slept_gets_them(clock, history):
    source = Measured()
    page = Watcher(history, source)
    step(clock, history, source, c={"n1": 0})
    page.look()
    for i in range(N_COLUMNS + 7):
        step(clock, history, source, c={"n1": i % 200})
    levels = page.look()["n1"]
    assert len(levels) == N_COLUMNS + 1
    assert levels == [i % 200 for i in range(7, N_COLUMNS + 7)] + [(N_COLUMNS + 6) % 200]


def test_a_cluster_that_fell_silent_is_shown_until_nothing_of_it_is_left(clock, history):
    source = Measured()
    step(clock, history, source, c={"n1": 3}, other={"x": 1})
    step(clock, history, source, other={"x": 1})
    assert Watcher(history, source).look() == {"n1": [3, UNKNOWN, UNKNOWN]}
    for _ in range(N_COLUMNS):
        step(clock, history, source, other={"x": 1})
    with pytest.raises(KeyError):
        Watcher(history, source).look()
    assert Watcher(history, source).look("other")["x"][-1] == 1


def test_what_would_take_too_much_memory_is_counted_for_the_page(clock, history, monkeypatch):
    monkeypatch.setattr(heat, "MAX_BYTES", 3 * N_COLUMNS)
    source = Measured()
    step(clock, history, source, c={"n1": 1, "n2": 2})
    step(clock, history, source, c={"n1": 3, "n2": 4, "n3": 5, "n4": 6})
    page = Watcher(history, source)
    assert page.look() == {"n1": [1, 3, 3], "n2": [2, 4, 4], "n3": [UNKNOWN, 5, 5]}
    assert page.head["n_missing"] == 1


def test_many_pages_at_one_moment_cost_one_reading(clock, history):
    source = Measured(c={"n1": 7})
    for _ in range(5):
        assert Watcher(history, source).look() == {"n1": [7]}
    assert source.n_reads == 1


def test_rows_of_jobs_long_gone_are_forgotten(clock, history):
    source = Measured()
    step(clock, history, source, c={f"old{i}": 1 for i in range(100)})
    for _ in range(N_COLUMNS):
        step(clock, history, source, c={"n1": 2})
    assert list(Watcher(history, source).look()) == ["n1"]


def test_page_that_knows_another_fleets_rows_gets_the_names_of_these(clock, history):
    source = Measured()
    page = Watcher(history, source)
    step(clock, history, source, c={"n1": 1, "n2": 2})
    page.look()
    page.history = HeatHistory(clock, 5 * SECOND)  # Fleet was started again
    step(clock, page.history, source, c={"n7": 7, "n8": 8})
    assert page.look() == {"n7": [7, 7], "n8": [8, 8]}


def test_every_version_of_rows_can_be_asked_for_by_a_page(clock, history, monkeypatch):
    monkeypatch.setattr("secrets.randbelow", lambda above: above - 1)
    source = Measured(c={"n1": 7})
    page = Watcher(history, source)
    page.look()
    assert 0 < page.head["version"] < 2**53 - 10**9
    assert _NUMBER.fullmatch(str(page.head["version"] + 10**9))


def test_rows_of_a_job_that_just_ended_are_not_sent_again_and_again(clock, history):
    source = Measured()
    page = Watcher(history, source)
    step(clock, history, source, c={f"old{i}": 1 for i in range(100)} | {"n1": 2})
    page.look()
    version = page.head["version"]
    step(clock, history, source, c={"n1": 2})
    for _ in range(3):
        clock.advance(SECOND)
        assert page.look()["old7"] == [1, UNKNOWN, UNKNOWN]
        assert "names" not in page.head
    assert page.head["version"] == version
