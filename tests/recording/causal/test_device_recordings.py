"""What happened in recordings that this agent made on a real device, with default options."""

import gzip
from pathlib import Path

import pytest

from ingero.recording.causal.engine import explain
from ingero.recording.store.reader import load_recording

DBS = Path(__file__).parents[2] / "data" / "device_dbs"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What is said of a recording, once each."""
    made = {}

    def get(name):
        if name not in made:
            path = tmp_path_factory.mktemp("device") / name
            path.write_bytes(gzip.decompress((DBS / f"{name}.gz").read_bytes()))
            made[name] = explain(load_recording(path))
        return made[name]

    return get


def of_rules(explanation, *rules):
    return [one for one in explanation.incidents if one.rule in rules]


@pytest.mark.parametrize("name", ["tri.db", "jax.db", "static.db"])
def test_compiling_once_before_the_first_launch_is_no_starvation(name, told):
    assert of_rules(told(name), "input_starvation", "one_off_stall") == []


def test_what_a_program_does_before_its_first_step_is_no_starvation(told):
    explanation = told("train.db")
    for one in of_rules(explanation, "input_starvation", "one_off_stall"):
        assert (one.start_ns - explanation.start_ns) / 1e9 > 11.6


def test_the_loader_that_every_step_waits_for_is_named(told):
    explanation = told("train.db")
    (found,) = of_rules(explanation, "input_starvation")
    assert (found.severity, found.pid) == ("HIGH", 770)
    assert found.causes[0].name == "waiting for worker pt_data_worker"
    assert found.causes[0].share > 0.85
    begin, end = ((at - explanation.start_ns) / 1e9 for at in (found.start_ns, found.end_ns))
    assert begin == pytest.approx(11.66, abs=0.2)
    assert end == pytest.approx(26.24, abs=0.1)
    assert found.tid == 770  # it waits for the thread that pins, which waits for the workers
    assert 12e9 < found.lost_ns < 14.6e9
    assert found.n_cases == pytest.approx(
        212 / 2, abs=4
    )  # two workers, whose batches come together


def test_code_that_is_read_from_the_disk_at_its_first_use_is_a_cold_start_alone(told):
    (found,) = told("static.db").incidents
    assert (found.rule, found.severity) == ("lazy_load", "LOW")
    assert found.lost_ns == pytest.approx(113e6, rel=0.01)


@pytest.mark.parametrize("name", ["train.db", "jax.db"])
def test_modules_that_a_runtime_loads_are_not_called_explicitly_loaded(name, told):
    (found,) = of_rules(told(name), "lazy_load")
    assert "module loading" in {cause.name for cause in found.causes}


@pytest.mark.parametrize(
    ("name", "least_s", "most_s"),
    [("tri.db", 1.2, 1.8), ("jax.db", 0.6, 1.3)],  # as PROVENANCE.md says when they compile
)
def test_a_compiler_that_runs_at_the_start_is_in_the_cold_start(name, least_s, most_s, told):
    explanation = told(name)
    (found,) = of_rules(explanation, "lazy_load")
    assert found.causes[0].name == "compiling"
    assert least_s * 1e9 < found.lost_ns * found.causes[0].share < most_s * 1e9
    assert f"{found.process} compiled for" in found.title


@pytest.mark.parametrize("name", ["train.db", "static.db"])
def test_where_no_compiler_ran_nothing_is_called_compiling(name, told):
    for one in told(name).incidents:
        assert "compil" not in one.title
        assert "compiling" not in {cause.name for cause in one.causes}


@pytest.mark.parametrize("name", ["train.db", "tri.db", "jax.db", "static.db"])
def test_no_recorded_program_compiled_again_and_again(name, told):
    assert of_rules(told(name), "repeated_compiling") == []


def test_time_without_calls_is_called_the_most_that_the_gpu_can_have_been_idle(told):
    (found,) = of_rules(told("train.db"), "input_starvation")
    assert "python3 made no GPU call for 88% of a 14.6 s phase" in found.title
    assert "GPU was silent" not in found.title
    assert any(
        "the most that the GPU can have been idle" in fact for fact in found.causes[0].evidence
    )
