"""Collectives of a real PyTorch over Gloo: who, which, how many bytes, and what an exception leaves. Needs torch, in no place of ours."""

import json
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tests.support.ports import free_port

from ingero.agent.capture.discover.processes import open_file
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.probes.torch import find_torch_target
from ingero.config.environment import ProbeMode
from ingero.config.torch import find_torch_python
from ingero.model.events import GlooOp, Source

pytestmark = [pytest.mark.kernel, pytest.mark.torch, pytest.mark.slow]
SCRIPTS = Path(__file__).parent / "torch"
ORDER = (
    GlooOp.BARRIER,
    GlooOp.BROADCAST,
    GlooOp.ALL_GATHER,
    GlooOp.GATHER,
    GlooOp.SCATTER,
    GlooOp.REDUCE,
    GlooOp.ALL_TO_ALL,
    GlooOp.ALL_TO_ALL,
)
THROWN = {
    "barrier": GlooOp.BARRIER,
    "allreduce": GlooOp.ALL_REDUCE,
    "allgather": GlooOp.ALL_GATHER,
    "alltoall": GlooOp.ALL_TO_ALL,
    "alltoallv": GlooOp.ALL_TO_ALL,
    "broadcast": GlooOp.BROADCAST,
    "gather": GlooOp.GATHER,
    "reduce": GlooOp.REDUCE,
    "scatter": GlooOp.SCATTER,
}


@pytest.fixture(scope="module")
def python():
    return find_torch_python()


@pytest.fixture(scope="module")
def library(python):
    (path,) = python.parent.parent.glob("lib/python3*/site-packages/torch/lib/libtorch_cpu.so")
    return path


@pytest.fixture
def start_probed(start_engine, library):
    """An engine on Gloo in the children of this process."""

    def start(mode):
        engine = start_engine(EngineSettings(host_probes=(), probe_mode=mode))
        with open_file(library) as opened:
            assert engine.attach(find_torch_target(opened, str(library), Path("/")), opened.reach)
        return engine

    return start


@contextmanager
def start_ranks(python, script, n_ranks):
    """The ranks; killed in the end, so that a test that fails leaves no pipe for another's collection of garbage."""
    port = str(free_port())
    shared = {"WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with ExitStack() as stack:
        ranks = []
        for rank in range(n_ranks):
            started = subprocess.Popen(
                [python, SCRIPTS / script],
                env={**shared, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            ranks.append(stack.enter_context(started))
            stack.callback(started.kill)
        yield ranks


def run_ranks(python, script, n_ranks):
    """What each rank printed."""
    with start_ranks(python, script, n_ranks) as ranks:
        outputs = [rank.communicate()[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * n_ranks
    return {rank.pid: output for rank, output in zip(ranks, outputs, strict=True)}


class Numbered(NamedTuple):
    """What makes a collective the same one on every rank, and whose it is."""

    comm_hash: int
    rank: int
    nranks: int
    seq: int
    op: int


def read_numbered(traced, pids):
    records = traced.records["collectives"]
    records = records[records["seq"] > 0]
    return {
        pid: [
            Numbered(*(int(row[name]) for name in Numbered._fields))
            for row in records[records["pid"] == pid]
        ]
        for pid in pids
    }


def test_every_collective_is_numbered_alike_on_each_rank_of_its_group(python, start_probed, read):
    engine = start_probed(ProbeMode.AUTO)
    pids = list(run_ranks(python, "collectives.py", 2))
    records = read(engine, []).records["collectives"]
    records = records[records["seq"] > 0]
    groups = {}
    for rank, pid in enumerate(pids):
        mine = records[records["pid"] == pid]
        assert set(mine["source"]) == {Source.GLOO}
        assert set(mine["rank"]) == {rank}
        assert set(mine["nranks"]) == {2}
        default, own = mine["comm_hash"][0], mine["comm_hash"][3]
        assert 0 not in {default, own}
        groups[pid] = int(default), int(own)
        first, second = mine[mine["comm_hash"] == default], mine[mine["comm_hash"] == own]
        assert first["op"].tolist()[:3] == [GlooOp.ALL_REDUCE] * 3
        assert first["bytes"].tolist()[:3] == [4000] * 3
        assert first["seq"].tolist() == [1, 2, 3, 4]
        assert second["op"].tolist() == list(ORDER)
        assert second["seq"].tolist() == list(range(1, len(ORDER) + 1))
        assert second["peer"].tolist() == [-1, 1, -1, 0, 1, 1, -1, -1]
        assert (mine["rc"] == 0).all()
        assert (mine["duration_ns"] > 0).all()
    assert len(set(groups.values())) == 1  # the same communicators on both ranks
    assert groups[pids[0]][0] != groups[pids[0]][1]
    assert len(engine.state.read_in_flight()) == 0


@pytest.mark.parametrize("mode", [ProbeMode.SESSION, ProbeMode.PAIR, ProbeMode.EVENT])
def test_groups_that_were_made_before_the_probes_are_who_they_were(
    python, start_probed, read, mode
):
    first = start_probed(mode)
    with start_ranks(python, "late.py", 2) as ranks:
        for rank in ranks:
            assert rank.stdout.readline() == b"ready\n"
        late = start_probed(mode)
        for rank in ranks:
            late.control.watch_pid(rank.pid)
            rank.stdin.write(b"on\n")
            rank.stdin.flush()
        for rank in ranks:
            rank.communicate()
            assert rank.returncode == 0
    pids = [rank.pid for rank in ranks]
    known, seen = (read_numbered(read(engine, []), pids) for engine in (first, late))
    assert [len(rows) for rows in known.values()] == [7, 7]
    assert seen == {pid: rows[3:] for pid, rows in known.items()}
    assert all(row.comm_hash for rows in seen.values() for row in rows)


def test_waits_for_point_to_point_are_seen_and_have_no_number(python, start_probed, read):
    engine = start_probed(ProbeMode.AUTO)
    pids = list(run_ranks(python, "collectives.py", 2))
    records = read(engine, []).records["collectives"]
    for pid, op in zip(pids, (GlooOp.SEND, GlooOp.RECV), strict=True):
        waits = records[
            (records["pid"] == pid) & np.isin(records["op"], (GlooOp.SEND, GlooOp.RECV))
        ]
        assert (waits["op"].tolist(), waits["seq"].tolist()) == ([op], [0])


@pytest.mark.parametrize("mode", [ProbeMode.SESSION, ProbeMode.PAIR, ProbeMode.EVENT])
def test_an_exception_through_every_probed_function_reaches_whoever_catches_it(
    python, start_probed, read, mode
):
    engine = start_probed(mode)
    run = subprocess.run([python, SCRIPTS / "throws.py"], stdout=subprocess.PIPE, check=True)
    caught = json.loads(run.stdout)["caught"]
    assert caught == {
        **dict.fromkeys((*THROWN, "send", "recv"), "RuntimeError"),
        "group": "DistStoreError",
    }
    traced = read(engine, [])
    records = traced.records["collectives"]
    failed = records[records["rc"] != 0]
    numbered = failed[failed["seq"] > 0]
    assert numbered["op"].tolist() == list(THROWN.values())
    assert (numbered["duration_ns"] > 0).all()  # until it was caught
    for op in set(THROWN.values()):
        (at,) = np.flatnonzero((traced.keys["source"] == Source.GLOO) & (traced.keys["op"] == op))
        assert traced.counts["errors"][at] == (numbered["op"] == op).sum()
        assert traced.counts["entered"][at] == traced.counts["seen"][at]
