"""The simulator behaves as the workloads' names say, by their own accounts. No root, no probe."""

import json
import os
import signal
import struct
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from ingero.agent.capture.discover.identity import read_identity
from ingero.cli.main import cli, run_program
from ingero.errors import ConfigError, IngeroError
from ingero.sim.runner import SimSettings, Simulation
from ingero.sim.workloads import WORKLOADS
from ingero.testing.waiting import wait_until

# Probes see every process of the machine: these calls must not run beside the tests that count calls.
pytestmark = pytest.mark.xdist_group("kernel")

MIB = 1 << 20


def run(name, n_ranks=0, device=None, **knobs):
    with Simulation(SimSettings(name, knobs, n_ranks, device or {})) as simulation:
        return simulation.wait()


QUICK = {
    "train": {"steps": 3, "slow_from": 3},
    "infer": {"requests": 2},
    "serve": {"requests": 2},
    "leak": {"steps": 5},
    "fragment": {"pairs": 5},
    "copy": {"steps": 2},
    "sync": {"steps": 5},
    "graph": {"launches": 3},
    "ranks": {"steps": 3},
    "storm": {"launches": 1009},
    "hang": {"wait_ms": 1},
    "cost": {"launches": 1009},
    "primes": {},
}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_runs_and_accounts_for_itself(workload):
    accounts = run(workload.name, **QUICK[workload.name])
    assert len(accounts) == workload.n_ranks
    assert {account["workload"] for account in accounts} == {workload.name}
    assert len({account["pid"] for account in accounts}) == workload.n_ranks


def test_a_rank_is_known_by_the_slurm_step_that_simulates_it(monkeypatch):
    for name, value in {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0", "LD_PRELOAD": "/no"}.items():
        monkeypatch.setenv(name, value)
    with Simulation(SimSettings("hang", {"wait_ms": 60_000}, 1)) as simulation:
        environ = Path(f"/proc/{simulation.pids[0]}/environ")
        variables = wait_until(environ.read_text)  # empty while the program is still being loaded
        known = read_identity(simulation.pids[0])
    assert (known.job, known.slurm.job, known.slurm.step, known.place.rank) == ("42", "42", "0", 0)
    assert "LD_PRELOAD" not in variables


def test_a_wait_takes_as_long_as_the_kernels_before_it():
    (account,) = run("sync", steps=11, device={"KERNEL_NS": 1_000_000})
    assert account["calls"]["cudaDeviceSynchronize"]["calls"] == 11
    # Each wait sleeps to the end of its 1 ms kernel; what the launch itself took is not in it.
    spent_ns = account["calls"]["cudaDeviceSynchronize"]["total_ns"]
    assert spent_ns + account["calls"]["cudaLaunchKernel"]["total_ns"] >= 11 * 1_000_000


def test_the_first_launch_of_each_function_loads_it():
    settings = {"KERNEL_NS": 1_000, "FIRST_LAUNCH_NS": 20_000_000}
    (account,) = run("sync", steps=5, device=settings)
    launches = account["calls"]["cudaLaunchKernel"]
    assert launches["calls"] == 5
    assert launches["total_ns"] >= 20_000_000


def test_the_first_use_of_the_device_makes_the_context():
    (account,) = run("leak", steps=3, device={"CONTEXT_NS": 30_000_000})
    assert account["calls"]["cudaMalloc"]["total_ns"] >= 30_000_000


def test_kernels_of_processes_that_share_a_device_run_one_after_another():
    device = os.memfd_create("device")
    settings = {"KERNEL_NS": 1_000_000, "SHARED_DEVICE_FD": device}
    one = SimSettings("sync", {"steps": 101}, device=settings)
    try:
        began_ns = time.monotonic_ns()
        with Simulation(one) as first, Simulation(one) as second:
            first.wait()
            second.wait()
        (until_ns,) = struct.unpack("Q", os.pread(device, 8, 0))
    finally:
        os.close(device)
    assert until_ns - began_ns >= 2 * 101 * 1_000_000
    assert until_ns <= time.monotonic_ns()  # and nothing is left: each had waited for its own


def test_what_is_no_shared_memory_is_refused_as_a_device(tmp_path):
    path = tmp_path / "read-only"
    path.touch()
    with path.open("rb") as device, pytest.raises(IngeroError, match="GPUSIM_SHARED_DEVICE_FD"):
        run("sync", steps=1, device={"SHARED_DEVICE_FD": device.fileno()})


def test_a_leak_ends_in_failed_allocations():
    (account,) = run("leak", steps=100, leak_one_in=1, device={"MEMORY_BYTES": 64 * MIB})
    numbers = account["calls"]["cudaMalloc"]
    assert (numbers["calls"], numbers["bytes"], numbers["errors"]) == (100, 64 * MIB, 92)


def test_fragmented_memory_refuses_what_would_fit_in_total():
    total = 100 * 9 * MIB
    (account,) = run("fragment", pairs=100, wanted_bytes=600 * MIB, device={"MEMORY_BYTES": total})
    assert account["calls"]["cudaFree"]["bytes"] == 800 * MIB
    assert account["calls"]["cudaMalloc"]["errors"] == 5


def test_a_slow_rank_holds_up_every_other_rank_in_the_barrier():
    even = run("ranks", steps=5)
    held = run("ranks", steps=5, slow_rank=2, slow_us=20_000)
    for account in held:
        waited_ns = sum(
            account["calls"][name]["total_ns"]
            for name in ("cudaStreamSynchronize", "cudaLaunchKernel", "ncclAllReduce")
        )
        if account["rank"] == 2:
            assert account["elapsed_ns"] >= 5 * 20_000_000
        else:
            assert waited_ns >= 4 * 20_000_000
    assert {account["comm_hash"] for account in even} != {account["comm_hash"] for account in held}
    assert len({account["comm_hash"] for account in held}) == 1


def test_a_split_communicator_orders_its_ranks_by_key():
    accounts = run("ranks", n_ranks=5, steps=2, split=1)
    # Colour is rank % 2 and the key is -rank: the highest parent rank comes first.
    assert [account["split_rank"] for account in accounts] == [2, 1, 1, 0, 0]
    assert [account["split_nranks"] for account in accounts] == [3, 2, 3, 2, 3]
    assert len({account["split_hash"] for account in accounts}) == 2


def test_an_unknown_workload_or_knob_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="no workload") as refused:
        Simulation(SimSettings("nope"))
    assert "train" in refused.value.hint
    with pytest.raises(ConfigError, match="no knob 'stepz'") as refused:
        Simulation(SimSettings("train", {"stepz": 1}))
    assert "steps" in refused.value.hint


def test_a_rank_that_the_job_does_not_have_is_not_the_slow_one():
    with pytest.raises(ConfigError, match="slow_rank=2: the last of 2 ranks is 1"):
        Simulation(SimSettings("ranks", {"slow_rank": 2}, n_ranks=2))


def test_a_number_of_ranks_that_no_job_has_is_refused(capsys):
    for wrong in ("-1", "1025"):
        assert run_program(cli, ["sim", "run", "ranks", "--ranks", wrong]) == 2
        assert "is not in the range 0<=x<=1024" in capsys.readouterr().err


def test_a_rank_that_dies_is_an_error_with_its_exit_status():
    with Simulation(SimSettings("hang")) as simulation:
        assert simulation.read_line() == "hanging\n"
        os.kill(simulation.pids[0], signal.SIGTERM)
        with pytest.raises(IngeroError, match="ended with -15"):
            simulation.wait()


def test_the_command_lists_and_runs_workloads():
    listed = json.loads(CliRunner().invoke(cli, ["sim", "list", "--json"]).output)
    assert [entry["name"] for entry in listed] == [workload.name for workload in WORKLOADS]
    assert all(entry["says"] for entry in listed)
    result = CliRunner().invoke(cli, ["sim", "run", "sync", "steps=7", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["calls"]["cudaDeviceSynchronize"]["calls"] == 7
