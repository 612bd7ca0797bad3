"""Each release of NVIDIA's NCCL under the probes: every call of two ranks is seen as it was made.

The ranks are those of tests/ncclprof/play.py; the table of releases is in docs/evidence/nccl.
"""

import pytest
from elftools.elf.elffile import ELFFile
from tests.kernel.test_nvidia_libraries import hash_of
from tests.ncclprof.play import COUNTS, FLOAT32, FLOAT64, N_RANKS
from tests.ncclprof.releases import (
    CHOSEN,
    build_stand_in,
    get_library,
    only_x86,
    read_table,
    run_ranks,
)

from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.symbols.nccl import NCCL
from ingero.model.events import NcclOp, Source

pytestmark = [pytest.mark.kernel, pytest.mark.slow, only_x86]

OPS = {
    "AllReduce": (NcclOp.ALL_REDUCE, FLOAT32, 4),
    "AllGather": (NcclOp.ALL_GATHER, FLOAT64, 8),
    "ReduceScatter": (NcclOp.REDUCE_SCATTER, FLOAT64, 8),
    "Broadcast": (NcclOp.BROADCAST, FLOAT64, 8),
}


def find_functions(library):
    """Names that a library exports."""
    with library.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
        return {symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF"}


@pytest.mark.parametrize("release", CHOSEN)
def test_every_call_of_a_release_is_seen_as_the_table_says(
    start_engine, read, target_of, tmp_path, release
):
    library, row = get_library(release), read_table()[release]
    assert len({function.name for function in NCCL} & find_functions(library)) == row.n_functions
    engine = start_engine(EngineSettings(host_probes=()), attach=False)
    engine.control.watch_uid(0)
    assert engine.attach(target_of(library))
    account, _ = run_ranks(library, build_stand_in(tmp_path), tmp_path, row.n_timed)
    assert all(rc == 0 for told in account["told"] for rc in told)
    traced = read(engine, [account])
    records = traced.records["collectives"]
    records = records[(records["pid"] == account["pid"]) & (records["depth"] == 0)]
    assert len(records) == row.n_calls == sum(map(len, account["told"]))
    made = records[records["op"] == NcclOp.COMM_INIT]
    assert sorted(made["rank"].tolist()) == list(range(N_RANKS))
    expected = [
        (int(OPS[name][0]), seq, OPS[name][1], count, count * OPS[name][2], 0, 0x77)
        for seq, (name, count) in enumerate(
            ((name, count) for name, counts in COUNTS.items() for count in counts), 1
        )
    ]
    fields = ("op", "seq", "dtype", "count", "bytes", "rc", "stream")
    for rank, comm in zip(made["rank"], made["comm_ptr"], strict=True):
        own = records[records["comm_ptr"] == comm]
        own = own[own["header"]["mono_ns"].argsort()]
        assert own["op"].tolist() == [
            NcclOp.COMM_INIT, *(one[0] for one in expected), NcclOp.COMM_USER_RANK, NcclOp.COMM_DESTROY,
        ]  # fmt: skip
        calls = own[1:-2]
        assert [tuple(int(call[field]) for field in fields) for call in calls] == expected
        assert set(calls["rank"]) == {rank}
        assert set(own["nranks"][:-2]) == {N_RANKS}
        assert {int(call["comm_hash"]) for call in own[:-2]} == {hash_of(account["words"])}
    assert not traced.losses["unmatched"]
    for op in NcclOp:
        if op in set(records["op"]):
            count = traced.count(account["pid"], Source.NCCL, op)
            assert count["entered"] == count["seen"]
            assert count["errors"] == 0
