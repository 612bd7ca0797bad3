"""NCCL identity and sequence, by value, for each way a communicator is made. Real processes, real barriers."""

import subprocess
from dataclasses import replace

import numpy as np
import pytest
from tests.support.compiler import CC

from ingero.agent.capture.kernel.abi import Flag, get_dtype
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.collectives.host import CollectiveTracker
from ingero.config.environment import ProbeMode
from ingero.model.collectives import ClockKind
from ingero.model.events import NcclOp, Source
from ingero.sim.runner import SimSettings, Simulation

pytestmark = pytest.mark.kernel

KEEP_ALL = EngineSettings(host_probes=(), keep_first=1 << 20)
FLOAT, BFLOAT16, FLOAT64, UINT8 = 7, 9, 8, 1

BCAST_LIBRARY = """
#include <stddef.h>
typedef void *any;
__attribute__((noinline)) int ncclBroadcast(any from, any to, size_t count, int type, int root, any comm, any stream)
{
	return from == to && comm && stream && root < 4 ? 0 : 4;
}
__attribute__((noinline)) int ncclBcast(any buffer, size_t count, int type, int root, any comm, any stream)
{
	return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
int ncclReduce(any from, any to, size_t count, int type, int op, int root, any comm, any stream)
{
	return op + ncclBroadcast(from, to, count, type, root, comm, stream);
}
int ncclAllReduce(any from, any to, size_t count, int type, int op, any comm, any stream)
{
	/* Of another communicator: what a call makes inside is not always the same collective again. */
	return ncclBroadcast(from, to, count, type, 0, (char *)comm + 1, stream);
}
int ncclCommUserRank(any comm, int *rank) { *rank = 2; return 0; }
int ncclCommCount(any comm, int *count) { *count = 4; return 0; }
"""
BCAST_PROGRAM = """
#include <stddef.h>
typedef void *any;
int ncclBroadcast(any, any, size_t, int, int, any, any);
int ncclBcast(any, size_t, int, int, any, any);
int ncclAllReduce(any, any, size_t, int, int, any, any);
int ncclReduce(any, any, size_t, int, int, int, any, any);
int ncclCommUserRank(any, int *);
int ncclCommCount(any, int *);
static char comm[2], stream[1];
int main(void)
{
	int got, rc = 0;

	for (int i = 0; i < 2; i++)
		rc |= ncclCommUserRank(comm + i, &got) | ncclCommCount(comm + i, &got);
	for (int i = 0; i < 3; i++)
		rc |= ncclBcast(comm, 10, 7, 1, comm, stream);
	rc |= ncclBroadcast(comm, comm, 20, 7, 1, comm, stream);
	rc |= ncclAllReduce(comm, comm, 30, 7, 0, comm, stream);
	for (int i = 0; i < 2; i++)
		rc |= ncclReduce(comm, comm, 40, 7, 0, 1, comm, stream);
	return rc;
}
"""


@pytest.mark.parametrize("init", [0, 1, 2], ids=["InitRank", "InitRankConfig", "InitRankScalable"])
def test_every_rank_is_known_with_its_communicator_and_sequence(trace_sim, init):
    traced = trace_sim("ranks", settings=KEEP_ALL, n_ranks=3, steps=7, init=init, count=1009)
    hashes = {account["comm_hash"] for account in traced.accounts}
    assert len(hashes) == 1
    for account in traced.accounts:
        pid = account["pid"]
        (made,) = traced.calls(pid, Source.NCCL, NcclOp.COMM_INIT, "collectives")
        reduced = traced.calls(pid, Source.NCCL, NcclOp.ALL_REDUCE, "collectives")
        assert int(made["comm_hash"]) == account["comm_hash"]
        assert (int(made["rank"]), int(made["nranks"])) == (account["rank"], 3)
        assert int(made["comm_ptr"]) == int(reduced[0]["comm_ptr"]) != 0
        assert set(reduced["comm_hash"]) == hashes
        assert set(reduced["rank"]) == {account["rank"]}
        assert set(reduced["nranks"]) == {3}
        assert set(reduced["device"]) == {account["rank"]}
        assert set(reduced["stream"]) == {account["stream"]}
        assert reduced["seq"].tolist() == list(range(1, 8))
        assert set(reduced["count"]) == {1009}
        assert set(reduced["bytes"]) == {1009 * 4}
        assert set(reduced["dtype"]) == {FLOAT}
        assert set(reduced["redop"]) == {0}


def test_root_type_and_operation_of_the_other_collectives(trace_sim):
    traced = trace_sim("ranks", settings=KEEP_ALL, n_ranks=2, steps=3)
    for account in traced.accounts:
        (cast,) = traced.calls(account["pid"], Source.NCCL, NcclOp.BROADCAST, "collectives")
        assert (int(cast["count"]), int(cast["bytes"]), int(cast["dtype"])) == (17, 136, FLOAT64)
        assert (int(cast["peer"]), int(cast["redop"]), int(cast["seq"])) == (0, -1, 4)
        (scattered,) = traced.calls(
            account["pid"], Source.NCCL, NcclOp.REDUCE_SCATTER, "collectives"
        )
        assert (int(scattered["bytes"]), int(scattered["dtype"])) == (19, UINT8)
        assert (int(scattered["redop"]), int(scattered["peer"]), int(scattered["seq"])) == (
            2,
            -1,
            5,
        )


def test_a_split_communicator_has_a_hash_of_its_own_and_its_own_ranks(trace_sim):
    traced = trace_sim("ranks", settings=KEEP_ALL, n_ranks=4, steps=5, split=1)
    assert len({account["split_hash"] for account in traced.accounts}) == 2
    for account in traced.accounts:
        gathered = traced.calls(account["pid"], Source.NCCL, NcclOp.ALL_GATHER, "collectives")
        assert set(gathered["comm_hash"]) == {account["split_hash"]}
        assert set(gathered["rank"]) == {account["split_rank"]}
        assert set(gathered["nranks"]) == {account["split_nranks"]}
        assert gathered["seq"].tolist() == [1, 2, 3, 4, 5]
        assert set(gathered["bytes"]) == {1031 * 2}
        assert set(gathered["dtype"]) == {BFLOAT16}
        # Each was in a group of its own; the all-reduces were in none.
        assert ((gathered["flags"] & Flag.GROUPED) != 0).all()
        assert gathered["group_id"].tolist() == [1, 2, 3, 4, 5]
        reduced = traced.calls(account["pid"], Source.NCCL, NcclOp.ALL_REDUCE, "collectives")
        assert set(reduced["group_id"]) == {0}
        assert set(reduced["rank"]) == {account["rank"]}


def test_the_end_of_a_collective_on_a_stream_of_its_own_is_known(trace_sim):
    traced = trace_sim("ranks", n_ranks=2, steps=20, own_stream=1)
    tracker = CollectiveTracker()
    tracker.add_calls(traced.records["kept_calls"])
    tracker.add_collectives(traced.records["collectives"])
    runs = tracker.take(0, None)
    for account in traced.accounts:
        (run,) = (run for run in runs if run.pid == account["pid"])
        assert run.clock is ClockKind.SYNC
        assert run.ops["seq"].tolist() == list(range(1, 23))
        assert (run.ops["inside_ns"] > 0).all()
        is_own_known = run.ops["own_ns"] >= 0
        assert (
            is_own_known.tolist() == [False] * 20 + [True] * 2
        )  # the last two are on the waiting stream


def test_a_destroyed_communicator_is_forgotten(start_engine):
    engine = start_engine(KEEP_ALL)
    with Simulation(SimSettings("ranks", {"steps": 2, "split": 1}, 2)) as simulation:
        simulation.wait()
    keys, _ = engine.maps["communicators"].read_all(
        get_dtype("handle_key"), get_dtype("communicator")
    )
    assert len(keys) == 0


@pytest.fixture(scope="module")
def caster(tmp_path_factory):
    """A library of NCCL's name whose ncclBcast calls ncclBroadcast, as NVIDIA's does, and a program that calls both and two made of them."""
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "library.c").write_text(BCAST_LIBRARY)
    (folder / "program.c").write_text(BCAST_PROGRAM)
    library, program = folder / "libnccl.so.2", folder / "program"
    subprocess.run(
        [*CC, "-shared", "-fPIC", folder / "library.c", "-Wl,-soname,libnccl.so.2", "-o", library],
        check=True,
    )
    subprocess.run(
        [*CC, folder / "program.c", library, f"-Wl,-rpath,{folder}", "-o", program], check=True
    )
    return library, program


@pytest.mark.parametrize("mode", [ProbeMode.SESSION, ProbeMode.PAIR, ProbeMode.EVENT])
def test_a_collective_that_calls_itself_under_another_name_is_one(
    caster, start_engine, read, target_of, mode
):
    library, program = caster
    engine = start_engine(replace(KEEP_ALL, probe_mode=mode), attach=False)
    assert engine.attach(target_of(library))
    subprocess.run([program], check=True)
    records = read(engine, []).records["collectives"]
    records = records[records["seq"] > 0]
    is_inner = (records["flags"] & Flag.NESTED) != 0
    first, other = np.unique(records["comm_ptr"]).tolist()
    outer = records[~is_inner & (records["comm_ptr"] == first)]
    assert outer["seq"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert outer["op"].tolist() == [
        *[NcclOp.BROADCAST] * 4, NcclOp.ALL_REDUCE, *[NcclOp.REDUCE] * 2
    ]  # fmt: skip
    assert outer["count"].tolist() == [10, 10, 10, 20, 30, 40, 40]
    inner = records[is_inner]
    assert inner["seq"].tolist() == [1, 6, 7]
    assert inner["comm_ptr"].tolist() == [other, first, first]
