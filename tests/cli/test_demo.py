"""Every demo ends with its own diagnosis and no other."""

import json
from itertools import combinations

import pytest
from click.testing import CliRunner

from ingero.agent.capture.gpu.driver import has_driver
from ingero.cli.commands.demo.command import DEMOS, OutputForm
from ingero.cli.main import cli, run_program
from ingero.errors import StoreError
from ingero.recording.store.reader import load_recording
from ingero.sim.programs.program import PROGRAMS

DIAGNOSIS = {
    "incident": ("preemption", "preempted by logrotate"),
    "cold-start": ("lazy_load", "first use: set-up inside the first cudaMalloc"),
    "cpu-contention": ("runnable_wait", "waiting for a free CPU"),
    "gpu-steal": ("gpu_sharing", "time slices taken by notebook (pid 5100)"),
    "memcpy-bottleneck": ("copy_bound", "host-to-device copies from pageable memory"),
    "periodic-spike": ("periodic_spike", "something that happens every 200 calls (129 ms)"),
}


def play(*args):
    result = CliRunner().invoke(cli, ["demo", *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def lines_of(*args):
    return [json.loads(line) for line in play(*args, "--json").splitlines()]


@pytest.mark.parametrize("name", sorted(DIAGNOSIS))
def test_demo_ends_with_its_own_diagnosis_and_no_other(name):
    demo, *events, incident, summary = lines_of(name, "--no-gpu")
    assert (demo["type"], demo["form"], demo["synthetic"]) == ("demo", "synthetic", True)
    assert {line["type"] for line in events} == {"event"}
    assert len(events) == summary["window"]["events"] > 0
    assert (incident["type"], incident["demo"], summary["n_incidents"]) == ("incident", name, 1)
    assert (incident["rule"], incident["causes"][0]["name"]) == DIAGNOSIS[name]
    # Of the process that shares a GPU only waits and graph launches are certain to have rows, so gpu-steal's share is
    # the least.
    assert incident["causes"][0]["share"] > 0.4
    assert incident["coverage"]["state"] == "exact"


def test_all_plays_every_demo_of_the_list():
    names = [line["name"] for line in lines_of() if line["type"] == "demo"]
    assert set(DIAGNOSIS) <= set(names)
    assert [demo.name for demo in DEMOS if demo.name in DIAGNOSIS] == [
        n for n in names if n in DIAGNOSIS
    ]


def test_event_of_a_demo_is_a_line_as_the_existing_agent_prints_it():
    event = lines_of("incident")[1]
    assert set(event) >= {
        "timestamp", "pid", "tid", "process_name", "source", "op", "duration_ns", "duration", "gpu_id", "args",
        "return_code", "anomaly",
    }  # fmt: skip


def test_alias_plays_its_demo():
    assert "notebook" in play("contention")


def test_kept_recording_can_be_explained_again(tmp_path):
    path = tmp_path / "kept.db"
    assert "logrotate" in play("incident", "--keep", path)
    assert len(load_recording(path).events) > 5000
    assert run_program(cli, ["demo", "incident", "--keep", str(path)]) == 2


def test_a_recording_that_could_not_be_kept_leaves_no_file(tmp_path):
    def fill_disk(_name, path):
        for end in ("", "-wal", "-shm"):
            path.with_name(path.name + end).write_bytes(b"half of it")
        raise StoreError("database or disk is full")

    with pytest.raises(StoreError, match="disk is full"):
        DEMOS[0].play(tmp_path / "kept.db", OutputForm("synthetic", "", fill_disk))
    assert list(tmp_path.iterdir()) == []


def test_unknown_demo_lists_the_known_ones(capsys):
    assert run_program(cli, ["demo", "nonsense"]) == 2
    assert "memcpy-bottleneck" in capsys.readouterr().err


def test_every_demo_has_a_program_that_does_it_for_real():
    assert PROGRAMS.keys() == DIAGNOSIS.keys()


def test_real_run_without_the_privileges_says_so(monkeypatch, capsys):
    monkeypatch.setattr("ingero.agent.capture.privileges.read_capabilities", frozenset)
    assert run_program(cli, ["demo", "incident", "--sim"]) == 3
    said = capsys.readouterr().err
    assert "a real run needs root" in said
    assert "without --sim or --gpu a demo is a recording and needs nothing" in said


@pytest.mark.parametrize("forms", [*combinations(("--no-gpu", "--sim", "--gpu"), 2)])
def test_the_forms_of_a_demo_exclude_each_other(forms, capsys):
    assert run_program(cli, ["demo", "incident", *forms]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_a_cuda_runtime_is_named_for_a_gpu_only(tmp_path, capsys):
    library = tmp_path / "libcudart.so"
    library.touch()
    assert run_program(cli, ["demo", "--sim", "--libcudart", str(library)]) == 2
    assert "--libcudart belongs to --gpu" in capsys.readouterr().err


@pytest.mark.skipif(has_driver(), reason="there is an NVIDIA device here")
def test_without_a_device_the_simulator_is_named(capsys):
    assert run_program(cli, ["demo", "incident", "--gpu"]) == 3
    said = capsys.readouterr().err
    assert "no NVIDIA device here (no driver answers at /dev/nvidiactl)" in said
    assert "use --sim" in said
