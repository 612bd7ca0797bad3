"""The job of `ingero up`, by what its ranks tell of themselves. No root, no probe."""

import select
from pathlib import Path

import numpy as np

from ingero.model.events import CudaOp, NcclOp, Source
from ingero.sim.cluster.simulated_agent import ReportReader, build_collectives, build_waits
from ingero.sim.job import COLLECTIVE, REPORT, WAIT, Job, JobSettings
from ingero.units import NS_PER_MS


def run_until(folder, n_records, n_ranks=2, **knobs):
    """Records of every rank, once each has told that many."""
    settings = JobSettings(n_ranks, folder, step_ns=2 * NS_PER_MS, has_reports=True, **knobs)
    told = [np.zeros(0, REPORT) for _ in range(n_ranks)]
    readers = [ReportReader(settings.report_path(rank)) for rank in range(n_ranks)]
    with Job(settings) as job:
        job.release()
        while min(map(len, told)) < n_records:
            job.check()
            told = [
                np.concatenate([old, reader.read()])
                for old, reader in zip(told, readers, strict=True)
            ]
            select.select([], [], [], 0.001)
    return told


def test_ranks_tell_every_collective_and_the_wait_behind_it(tmp_path):
    first, second = run_until(tmp_path, 20)
    assert first["what"][:4].tolist() == [COLLECTIVE, WAIT, COLLECTIVE, WAIT]
    for rank, told in enumerate((first, second)):
        entered = told[told["what"] == COLLECTIVE]
        assert entered["seq"].tolist() == list(range(1, len(entered) + 1))
        assert set(entered["rank"].tolist()) == {rank}
        assert set(entered["n_ranks"].tolist()) == {2}
        assert set(entered["n_launches"].tolist()) == {20}
        assert (np.diff(told["mono_ns"].astype(np.int64)) > 0).all()
    assert set(first["comm"].tolist()) == set(second["comm"].tolist())


def test_pairs_meet_on_links_of_their_own_before_all_do(tmp_path):
    told = run_until(tmp_path, 20, n_ranks=4, has_pairs=True)
    comms = [one["comm"][one["what"] == COLLECTIVE][:2].tolist() for one in told]
    assert comms[0][0] == comms[1][0] != comms[2][0] == comms[3][0]
    assert len({pair[1] for pair in comms}) == 1
    sizes = [one["n_ranks"][one["what"] == COLLECTIVE][:4].tolist() for one in told]
    assert sizes == [[2, 4, 2, 4]] * 4


def test_records_become_what_a_probe_would_have_written(tmp_path):
    told = np.zeros(3, REPORT)
    told["what"] = COLLECTIVE, WAIT, COLLECTIVE
    told["mono_ns"], told["duration_ns"] = (100, 120, 200), (10, 50, 5)
    told["comm"], told["seq"], told["rank"], told["n_ranks"] = (7, 0, 7), (1, 0, 2), (3, 0, 3), 8
    collectives, waits = build_collectives(told, 42), build_waits(told, 42)
    assert collectives["header"]["mono_ns"].tolist() == [100, 200]
    assert collectives[["pid", "comm_hash", "seq", "rank", "nranks"]].tolist() == [
        (42, 7, 1, 3, 8),
        (42, 7, 2, 3, 8),
    ]
    assert set(collectives["op"].tolist()) == {NcclOp.ALL_REDUCE}
    assert waits["duration_ns"].tolist() == [50]
    assert waits[["source", "op"]].tolist() == [(Source.CUDA, CudaOp.STREAM_SYNC)]


def test_half_a_record_waits_for_its_other_half(tmp_path):
    path = Path(tmp_path, "calls")
    reader = ReportReader(path)
    assert len(reader.read()) == 0
    record = np.ones(1, REPORT).tobytes()
    path.write_bytes(record + record[:10])
    assert len(reader.read()) == 1
    with path.open("ab") as file:
        file.write(record[10:])
    assert reader.read()["seq"].tolist() == [1]
