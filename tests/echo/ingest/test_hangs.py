"""From what Fleet says of a hang, over the wire, to Echo's columns and to the question who never arrived."""

import json

import numpy as np
import pytest

from ingero.echo.ingest.origin import to_timestamp
from ingero.echo.queries.context import QueryContext
from ingero.echo.queries.hangs import HANGS as QUESTION
from ingero.echo.schema.tables import HANGS
from ingero.fleet.processors.collectives.hangs import HangChanges, build_hangs
from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.model.hang import HangCause, HangRoot, StoppedGroup
from ingero.otlp.codec import decode_protobuf, encode_protobuf
from ingero.otlp.names import Signal
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S
from ingero.wire.collectives import build_collectives
from ingero.wire.hangs import HANG_EVENT

NOW_NS = ManualClock().wall_ns()
COMM = "00000000000000ab"
ROOT = HangRoot(2, HangCause.ABSENT, StoppedGroup(COMM, (0, 1, 2, 3)), 10, 9, (0, 1, 3), "n2", "j")


def over_the_wire(export):
    return decode_protobuf(encode_protobuf(export), Signal.LOGS)


@pytest.fixture
def tell(take):
    def tell(began=(), ended=(), *, ago_s=0, cluster="c1", standing_s=4.5):
        at_ns = NOW_NS - int(ago_s * NS_PER_S)
        take(over_the_wire(build_hangs(HangChanges(cluster, began, ended, standing_s), at_ns)))

    return tell


@pytest.fixture
def move(take):
    """Rank 2 is at ``seq``, the others at 10."""

    def move(seq, *, ago_s=300, cluster="c1"):
        runs = []
        for rank in range(4):
            ops = np.zeros(1, COLLECTIVE_OP)
            ops["seq"] = seq if rank == 2 else 10
            ops["op"] = CollectiveOp.ALL_REDUCE
            who = Rank(cluster, f"n{rank}", rank)
            runs.append(CollectiveRun(who, COMM, rank, 4, ClockKind.DEVICE, ops))
        take(over_the_wire(build_collectives(runs, NOW_NS - ago_s * NS_PER_S)))

    return move


@pytest.fixture
def ask(store):
    def ask(clusters=None, **args):
        with store.open_reader(5 * NS_PER_S) as reader:
            answer = QUESTION.ask(QueryContext(reader, clusters, NOW_NS, None), args)
        return json.loads(answer)["rows"]

    return ask


def read(store, sql):
    with store.open_reader(5 * NS_PER_S) as reader:
        return reader.rows(sql)


def test_every_field_of_a_hang_arrives(store, tell):
    tell(began=[ROOT])
    tell(ended=[ROOT], ago_s=-5)
    began, ended = read(store, f"SELECT {', '.join(HANGS.names)} FROM hangs ORDER BY ts")
    row = dict(zip(HANGS.names, began, strict=True))
    assert json.loads(row.pop("attributes"))["ingero.hang.blocks"] == ["0", "1", "3"]
    assert row == {
        "ts": to_timestamp(NOW_NS),
        "cluster_id": "c1",
        "node_id": "n2",
        "rank": 2,
        "job": "j",
        "comm": COMM,
        "state": "began",
        "cause": "absent",
        "missing_seq": 10,
        "last_finished_seq": 9,
        "blocks": [0, 1, 3],
        "standing_s": 4.5,
        "summary": f"rank 2 never arrived at operation 10 of {COMM} (absent); 3 wait for it",
    }
    row = dict(zip(HANGS.names, ended, strict=True))
    assert (row["state"], row["standing_s"], row["missing_seq"]) == ("ended", None, 10)
    assert read(store, "SELECT count(*) FROM logs") == [(0,)]


def test_a_hang_that_breaks_its_specification_is_kept_as_a_log(store, take):
    export = build_hangs(HangChanges("c1", (ROOT,), (), 4.5), NOW_NS)
    (record,) = export.tree.resource_logs[0].scope_logs[0].log_records
    record.attributes = [one for one in record.attributes if one.key != "ingero.rank"]
    assert take(over_the_wire(export)).rows.outcome.n_refused == 0
    assert read(store, "SELECT event_name, cluster_id FROM logs") == [(HANG_EVENT, "c1")]
    assert read(store, "SELECT count(*) FROM hangs") == [(0,)]


def test_fleets_record_names_the_rank_and_says_that_it_is_one(tell, move, ask):
    move(9)
    tell(began=[ROOT], ago_s=100)
    (row,) = ask()
    assert row.pop("silent_s") == pytest.approx(104.5, abs=0.01)
    assert row.pop("last_heard")
    assert row == {
        "cluster_id": "c1",
        "source": "record",
        "comm": COMM,
        "op": None,
        "seq": 10,
        "n_ranks": None,
        "n_waiting": 3,
        "node_id": "n2",
        "rank": 2,
        "job": "j",
        "cause": "absent",
        "last_finished_seq": 9,
        "blocks": [0, 1, 3],
        "behind": [],
        "never_seen": 0,
    }


def test_silence_is_asked_only_where_fleet_never_told_of_a_hang(tell, move, ask):
    move(9)
    move(9, cluster="c2")
    tell(began=[ROOT], ended=[], ago_s=100)
    assert [(row["cluster_id"], row["source"]) for row in ask()] == [
        ("c2", "silence"),
        ("c1", "record"),
    ]
    (row,) = ask(cluster_id="c2")
    assert (row["rank"], row["behind"], row["blocks"]) == (None, ["n2/2 at 9"], [])
    assert ask(frozenset({"c1"}), min_silent_s=1000)[0]["source"] == "record"
    tell(ended=[ROOT], ago_s=50)
    assert ask(cluster_id="c1") == []
    assert ask(cluster_id="c1", time_window="30s") == []


def test_a_cluster_whose_hang_is_long_over_is_not_judged_by_silence(tell, move, ask):
    tell(began=[ROOT], ago_s=90_000)
    tell(ended=[ROOT], ago_s=89_000)
    move(9)
    assert ask() == []


def test_a_hang_stands_until_its_end_also_when_it_began_before_the_window(tell, ask):
    tell(began=[ROOT], ago_s=7200)
    assert [row["rank"] for row in ask(time_window="15m")] == [2]
    tell(ended=[ROOT], ago_s=60)
    assert ask(time_window="15m") == []
    tell(began=[ROOT], ago_s=30)
    assert [row["silent_s"] for row in ask()] == [pytest.approx(34.5, abs=0.01)]


def test_a_beginning_counts_for_a_day_or_for_the_window(tell, ask):
    tell(began=[ROOT], ago_s=90_000)
    assert ask() == []
    assert [row["rank"] for row in ask(time_window="2d")] == [2]


def test_a_rank_that_later_finished_the_operation_is_not_listed(tell, move, ask):
    """Fleet ended before it could tell the end."""
    tell(began=[ROOT], ago_s=400)
    move(9)
    assert len(ask()) == 1
    move(10, ago_s=200)
    assert ask() == []


def test_a_rank_that_finished_the_operation_before_the_window_is_not_listed_either(tell, move, ask):
    tell(began=[ROOT], ago_s=18_000)
    move(9, ago_s=18_100)
    assert [row["rank"] for row in ask(time_window="1h")] == [2]
    move(10, ago_s=17_600)
    assert [ask(time_window=window) for window in ("1h", "6h", "1d")] == [[], [], []]


def test_the_latest_data_is_also_fleets_record(tell, move, ask):
    move(9)
    tell(began=[ROOT], ago_s=100)
    (row,) = ask(until="latest")
    assert row["silent_s"] == pytest.approx(4.5, abs=0.01)


def test_two_jobs_with_one_rank_number_hang_apart(tell, ask):
    other = HangRoot(2, HangCause.STUCK, ROOT.group, 10, None, (0,), "n2", "k")
    tell(began=[ROOT, other], ago_s=100)
    tell(ended=[ROOT], ago_s=50)
    assert [(row["job"], row["last_finished_seq"]) for row in ask()] == [("k", None)]
