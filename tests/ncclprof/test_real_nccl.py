"""Each release of NVIDIA's NCCL loads the plug-in by its own loader and drives it through its own calls, without a device.

Two ranks make a communicator and call collectives (play.py); what is not NCCL's own is the CUDA runtime below it (no_device.c). What
each release does is the table in docs/evidence/nccl.
"""

import pytest
from tests.ncclprof.play import COUNTS, N_CALLS, N_RANKS
from tests.ncclprof.releases import (
    CHOSEN,
    build_stand_in,
    get_library,
    only_x86,
    read_table,
    run_ranks,
)

from ingero.agent.collectives.plugin import INTERFACES, NAME, find_plugin
from ingero.model.collectives import CollectiveOp

pytestmark = [pytest.mark.slow, only_x86]

OPS = {
    "AllReduce": (CollectiveOp.ALL_REDUCE, 4),
    "AllGather": (CollectiveOp.ALL_GATHER, 8),
    "ReduceScatter": (CollectiveOp.REDUCE_SCATTER, 8),
    "Broadcast": (CollectiveOp.BROADCAST, 8),
}
"""Each with the bytes of an element."""
CHANNEL_NS = 5000  # as in no_device.c


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    return build_stand_in(tmp_path_factory.mktemp("no_device"))


def parse_version(release):
    numbers = [int(part) for part in release.removesuffix(".post1").split(".")]
    return numbers[0] * 10000 + numbers[1] * 100 + numbers[2]


def check_timed(account, n_timed):
    """Every collective of every rank has its row, with the times that the channels had; broadcasts, the last, before NCCL 2.29 only."""
    for rank in range(N_RANKS):
        rows = sorted(
            (row for row in account["rows"] if row["rank"] == rank), key=lambda row: row["seq"]
        )
        expected = [
            (seq, int(OPS[name][0]), count * OPS[name][1])
            for seq, (name, count) in enumerate(
                ((name, count) for name, counts in COUNTS.items() for count in counts), 1
            )
        ][:n_timed]
        assert [(row["seq"], row["op"], row["n_bytes"]) for row in rows] == expected
        for row in rows:
            assert row["n_ranks"] == N_RANKS
            assert row["n_channels"] > 0
            assert row["gpu_stop_ns"] - row["gpu_start_ns"] >= CHANNEL_NS * row["n_channels"]
            assert row["host_start_ns"] <= row["host_stop_ns"] <= row["host_seen_ns"]
    # The ranks of a communicator know it by the same number.
    assert len({row["comm"] for row in account["rows"]}) == 1
    assert sorted(place[1:] for place in account["places"]) == [
        [rank, N_RANKS, n_timed, n_timed] for rank in range(N_RANKS)
    ]


@pytest.mark.parametrize("release", CHOSEN)
def test_a_release_does_with_the_plug_in_what_the_table_says(release, stand_in, tmp_path):
    row = read_table()[release]
    account, said = run_ranks(get_library(release), stand_in, tmp_path, row.n_timed)
    assert account["version"] == parse_version(release)
    # NCCL goes on whatever becomes of the plug-in.
    assert account["told"] == [[0] * (N_CALLS + 3)] * N_RANKS
    if row.plugin.startswith("version "):
        assert account["apis"] == [int(row.plugin.split()[1])]
        assert account["apis"][0] in INTERFACES
        assert row.n_timed == N_CALLS - (account["version"] >= 22900)
        check_timed(account, row.n_timed)
        return
    assert (account["apis"], row.n_timed) == ([], 0)
    if row.plugin == "too old":
        assert "PROFILER/Plugin: failed to find ncclProfiler_v" in said
    elif row.plugin == "by name only":
        assert f"PROFILER/Plugin: Could not find: libnccl-profiler-{find_plugin()}.so" in said
    else:
        assert row.plugin == "none"
        assert "PROFILER/Plugin" not in said


def test_the_release_that_takes_no_path_takes_a_name(stand_in, tmp_path):
    name = NAME.removeprefix("libnccl-profiler-").removesuffix(".so")
    folders = f"{stand_in.parent}:{find_plugin().parent}"
    account, _ = run_ranks(
        get_library("2.27.3"), stand_in, tmp_path, N_CALLS, plugin=name, LD_LIBRARY_PATH=folders
    )
    assert account["apis"] == [4]
    check_timed(account, N_CALLS)


@pytest.mark.parametrize("release", CHOSEN[-1:])
def test_nothing_is_loaded_where_no_variable_names_it(release, stand_in, tmp_path):
    account, _ = run_ranks(get_library(release), stand_in, tmp_path, 0, plugin="")
    assert account["apis"] == []
