"""The model of what the kernel and the recorder leave out, which the conformance suite trusts, beside the real ones."""

import numpy as np
import pytest
from tests.support.degrade import KEEP_FIRST, sample, thin_seconds

from ingero.agent.capture.events import build_call_events
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.model.events import EventFlag
from ingero.model.sampling import is_never_sampled

pytestmark = pytest.mark.kernel
ONE_IN = 16
KNOBS = {"steps": 300, "kernels": 20, "batch_bytes": 1000, "loader_us": 0}


def rows_of(traced):
    """Every record of a call as the row that it becomes, in order of start."""
    records = np.concatenate([
        traced.records[ring] for ring in ("calls", "kept_calls", "failed_calls")
    ])
    events = build_call_events(records, 0)
    return events[np.argsort(events["start_ns"], kind="stable")]


def kinds_of(events):
    """Rows by (source, op)."""
    keys = sorted(set(zip(events["source"].tolist(), events["op"].tolist(), strict=True)))
    return {key: events[(events["source"] == key[0]) & (events["op"] == key[1])] for key in keys}


def check(rows, seen, one_in):
    """What holds for the rows of every kind, of the kernel as of the model."""
    for (source, op), mine in kinds_of(rows).items():
        if is_never_sampled(np.uint8([source]), np.uint8([op]))[0]:
            assert len(mine) == seen[source, op]
            assert set(mine["weight"]) == {1}
            continue
        is_kept = (mine["flags"] & EventFlag.EXEMPLAR) != 0
        assert is_kept.sum() >= min(KEEP_FIRST, seen[source, op])
        assert set(mine["weight"][is_kept]) <= {1}
        assert set(mine["weight"][~is_kept]) <= {one_in}
        assert (~is_kept).sum() == (seen[source, op] - is_kept.sum()) // one_in
        assert seen[source, op] - one_in < mine["weight"].sum() <= seen[source, op]


def test_the_kernel_finds_the_calls_slow_that_the_model_finds_slow(trace_sim):
    every = trace_sim("train", settings=EngineSettings(host_probes=(), keep_first=1 << 30), **KNOBS)
    rows = rows_of(every)
    assert len(rows) == every.counts["seen"].sum()
    said = rows["flags"] & EventFlag.SLOW
    plain = rows.copy()
    plain["flags"] = 0
    is_sampled = ~is_never_sampled(rows["source"], rows["op"])
    model = sample(plain, 1, ())[is_sampled]  # one in one: every row stays, with its flags
    assert (model["flags"] & EventFlag.SLOW).tolist() == said[is_sampled].tolist()


def test_the_kernel_keeps_as_many_of_each_kind_as_the_model(trace_sim):
    every = trace_sim("train", settings=EngineSettings(host_probes=(), keep_first=1 << 30), **KNOBS)
    rows = rows_of(every)
    seen = {key: len(mine) for key, mine in kinds_of(rows).items()}
    rows["flags"] = 0
    assert EngineSettings().keep_first == KEEP_FIRST
    real = trace_sim("train", settings=EngineSettings(host_probes=(), keep_one_in=ONE_IN), **KNOBS)
    chosen = rows_of(real)
    counted = {
        (int(key["source"]), int(key["op"])): int(count["seen"])
        for key, count in zip(real.keys, real.counts, strict=True)
    }
    assert counted == seen
    assert sum(len(mine) for mine in kinds_of(chosen).values()) < len(rows) / 2
    model = sample(rows, ONE_IN, set(filter(is_exact, seen)))
    check(chosen, counted, ONE_IN)
    check(model, seen, ONE_IN)
    for whole in (chosen, model):
        before, after = kinds_of(whole), kinds_of(thin_seconds(whole))
        assert before.keys() == after.keys()
        for key, mine in after.items():
            assert mine["weight"].sum() == before[key]["weight"].sum()
            assert not is_exact(key) or len(mine) == len(before[key])


def is_exact(kind):
    """Whether every call of a kind has a row."""
    return bool(is_never_sampled(np.uint8([kind[0]]), np.uint8([kind[1]]))[0])
