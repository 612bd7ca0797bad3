"""Prefill and decode told apart by what each server's own steps are."""

import numpy as np
import pytest

from ingero.detect.inference.phases import DECODE, PREFILL, UNKNOWN, PhaseModel
from ingero.detect.inference.steps import STEP

WARMUP = 30


def steps_of(*shapes):
    """Rows of STEP from (launches, graphs, bytes in, blocks, duration)."""
    rows = np.zeros(len(shapes), STEP)
    names = ("n_launches", "n_graphs", "input_bytes", "blocks", "end_ns")
    for name, values in zip(names, zip(*shapes, strict=True), strict=True):
        rows[name] = values
    return rows


def serve(prefill, decode, n_requests=10, n_tokens=20):
    """Steps of requests, and which of them are prefill."""
    shapes = ([prefill] + [decode] * n_tokens) * n_requests
    is_prefill = np.tile(np.arange(n_tokens + 1) == 0, n_requests)
    return steps_of(*shapes), np.where(is_prefill, PREFILL, DECODE)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((500, 0, 16_384, 900.0, 60e6), (500, 0, 8, 40.0, 20e6)),  # every kernel launched in both
        ((500, 0, 16_384, 900.0, 60e6), (12, 1, 8, 8.0, 20e6)),  # decode is a CUDA graph
        ((0, 3, 16_384, 0.0, 60e6), (0, 1, 8, 0.0, 20e6)),  # both are: only the prompt tells
        ((80, 0, 0, 900.0, 60e6), (80, 0, 0, 40.0, 20e6)),  # the prompt came by other means
    ],
)
def test_the_steps_of_requests_are_told_apart(prefill, decode):
    steps, truth = serve(prefill, decode)
    assert PhaseModel(WARMUP).take(steps).tolist() == truth.tolist()


def test_nothing_is_told_before_the_warm_up_and_everything_after_it():
    steps, truth = serve((500, 0, 16_384, 900.0, 60e6), (500, 0, 8, 40.0, 20e6))
    model = PhaseModel(WARMUP)
    assert set(model.take(steps[: WARMUP - 1]).tolist()) == {UNKNOWN}
    assert model.take(steps[WARMUP - 1 :]).tolist() == truth[WARMUP - 1 :].tolist()


def test_a_server_whose_steps_are_alike_has_no_phases():
    model = PhaseModel(WARMUP)
    assert set(model.take(steps_of(*[(80, 0, 600_000, 40.0, 9e6)] * 400)).tolist()) == {UNKNOWN}


def test_a_heavy_start_is_no_prefill():
    """Warming up, capturing graphs: more work at first, and never again."""
    model = PhaseModel(WARMUP)
    shapes = [(5000, 0, 8, 40.0, 900e6)] * 3 + [(80, 0, 8, 40.0, 9e6)] * 200
    assert set(model.take(steps_of(*shapes)).tolist()) == {UNKNOWN}


def test_a_slow_decode_step_stays_one_and_a_long_prompt_too():
    steps, _ = serve((500, 0, 16_384, 900.0, 60e6), (500, 0, 8, 40.0, 20e6))
    model = PhaseModel(WARMUP)
    model.take(steps)
    later = steps_of((500, 0, 8, 40.0, 900e6), (500, 0, 160_000, 9000.0, 900e6))
    assert model.take(later).tolist() == [DECODE, PREFILL]


def test_a_larger_batch_of_tokens_is_still_decode():
    """Sixty-four requests at once bring more in, and take hardly longer."""
    steps, _ = serve((500, 0, 16_384, 900.0, 60e6), (500, 0, 8, 40.0, 20e6))
    model = PhaseModel(WARMUP)
    model.take(steps)
    assert set(model.take(steps_of(*[(500, 0, 512, 40.0, 24e6)] * 50)).tolist()) == {DECODE}


def test_what_decode_is_follows_the_server():
    """Contexts grow, and so do the decode steps; phases stay known through hours without a prompt."""
    steps, _ = serve((500, 0, 16_384, 900.0, 60e6), (500, 0, 8, 40.0, 20e6))
    model = PhaseModel(WARMUP)
    model.take(steps)
    for grown in np.linspace(20e6, 80e6, 40):
        shapes = [(500, 0, 8 * grown / 20e6, 40.0 * grown / 20e6, grown)] * 40
        assert set(model.take(steps_of(*shapes)).tolist()) == {DECODE}
    assert model.take(steps_of((500, 0, 65_536, 4000.0, 200e6))).tolist() == [PREFILL]


QUIET, LOADED = (500, 0, 8, 40.0, 20e6), (500, 0, 512, 40.0, 32e6)
PROMPT = (500, 0, 16_384, 900.0, 60e6)


def phases_under_load(shapes, *, batch):
    """Phases of steps that follow requests one at a time, taken so many at once."""
    steps, _ = serve(PROMPT, QUIET)
    model = PhaseModel(WARMUP)
    model.take(steps)
    later = steps_of(*shapes)
    parts = [model.take(later[at : at + batch]) for at in range(0, len(later), batch)]
    return np.concatenate(parts)


@pytest.mark.parametrize("batch", [1, 7, 600])
@pytest.mark.parametrize(
    "loaded",
    [LOADED, (900, 0, 8, 90.0, 38e6)],
    ids=["many-requests", "beyond-the-captured-graphs"],
)
def test_what_decode_is_is_learned_again_when_the_load_rises_at_once(loaded, batch):
    """It stays so high for hours: steps are prefill until most of the newest are, then unknown until a prompt comes."""
    phases = phases_under_load([loaded] * 100 + ([PROMPT] + [loaded] * 20) * 10, batch=batch)
    assert (phases[:100] == PREFILL).sum() <= WARMUP
    assert set(phases[WARMUP:90].tolist()) == {UNKNOWN}
    assert PREFILL not in phases[90:100]
    _, truth = serve(PROMPT, loaded)
    found = phases[100:]
    assert found[found != UNKNOWN].tolist() == truth[found != UNKNOWN].tolist()
    assert (found[1:] != UNKNOWN).mean() > 0.8


def test_many_prompts_at_once_are_not_taken_for_decode():
    """Sixty-four requests come together: their prompts are worked on one by one before the first tokens."""
    phases = phases_under_load([PROMPT] * 64 + [QUIET] * 200, batch=1)
    assert DECODE not in phases[:64]
    assert set(phases[-100:].tolist()) == {DECODE}


def test_a_load_that_falls_leaves_the_phases_known():
    phases = phases_under_load(
        [LOADED] * 100 + ([PROMPT] + [LOADED] * 20) * 10 + ([PROMPT] + [QUIET] * 20) * 20, batch=30
    )
    _, truth = serve(PROMPT, QUIET, 20)
    assert phases[-420:].tolist() == truth.tolist()
