"""Tiers: a test that needs more than this machine has is skipped with the reason, or fails when it was required.

``INGERO_REQUIRE=kernel,gpu,browser`` names the tiers whose absence is a failure. Tests run in several processes
(pytest-xdist); those of the kernel tier share one, since a probe sees every process of the machine.

Property tests draw the same examples in each run, so that a change passes or fails for what it changes; `make fuzz`
draws others.
"""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.support.browser import why_no_browser
from tests.support.collector import open_collector

from ingero.agent.capture.gpu.driver import has_driver
from ingero.agent.capture.kernel.perf import UPROBE_TYPE
from ingero.config.environment import ProbeMode, read_probe_mode
from ingero.config.torch import TORCH_PYTHON, find_torch_python
from ingero.sim.cluster.slurm import why_no_slurm
from ingero.testing.waiting import wait_until

DATA = Path(__file__).parent / "data"
MAX_REMOVAL_S = 300


def why_not_kernel() -> str:
    if os.geteuid() != 0:
        return "needs root"
    if not Path("/sys/kernel/btf/vmlinux").exists():
        return "needs a kernel with BTF"
    return ""


def why_not_gpu() -> str:
    return "" if has_driver() else "needs an NVIDIA device"


def why_not_torch() -> str:
    return (
        "" if find_torch_python() else f"needs a Python with torch, or its path in {TORCH_PYTHON}"
    )


REASONS = {
    "torch": why_not_torch,
    "kernel": why_not_kernel,
    "gpu": why_not_gpu,
    "browser": why_no_browser,
    "slurm": why_no_slurm,
}


# How long an example takes is no outcome: Hypothesis allows 200 ms, which a busy machine exceeds now and then.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", UNTIMED, derandomize=True)
settings.register_profile("any", UNTIMED, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("INGERO_PROPERTIES", "same"))


def find_group(item):
    """Tests that run in one process, the largest groups first: those of the kernel, and a module's that share a fixture.

    What a module's tests share takes long to make, and each process that runs some of them would make it again.
    """
    if "kernel" in item.keywords:
        return "kernel"
    definitions = item._fixtureinfo.name2fixturedefs.values()
    is_shared = any(one.scope in {"module", "package"} for found in definitions for one in found)
    return item.nodeid.partition("::")[0] if is_shared else None


def pytest_configure(config):
    # A run in the background has SIGINT ignored and its children inherit that; tests interrupt their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups when its own turn comes
def pytest_collection_modifyitems(items):
    for item in items:
        group = find_group(item)
        if group and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group))
        if "kernel" in item.keywords and read_probe_mode() is ProbeMode.EVENT:
            item.add_marker(pytest.mark.timeout(MAX_REMOVAL_S + 120))
    required = {tier for tier in os.environ.get("INGERO_REQUIRE", "").split(",") if tier}
    for tier, why_not in REASONS.items():
        reason = why_not()
        if not reason:
            continue
        for item in items:
            if tier in item.keywords:
                if tier in required:
                    item.user_properties.append(("required_tier_missing", f"{tier}: {reason}"))
                else:
                    item.add_marker(pytest.mark.skip(reason=f"{tier} tier: {reason}"))


def pytest_runtest_setup(item):
    for name, why in item.user_properties:
        if name == "required_tier_missing":
            pytest.fail(
                f"INGERO_REQUIRE asks for a tier that cannot run here ({why})", pytrace=False
            )


def pytest_terminal_summary(terminalreporter):
    for tier in REASONS:
        counts = {
            outcome: sum(tier in report.keywords for report in terminalreporter.getreports(outcome))
            for outcome in ("passed", "failed", "skipped")
        }
        told = ", ".join(f"{n} {outcome}" for outcome, n in counts.items() if n)
        terminalreporter.write_line(f"{tier} tier: {told or 'none collected'}")


@pytest.fixture(autouse=True)
def removals_are_over(request):
    """Of probes by perf events the kernel removes about nine a second, whoever had them, and new ones wait for it."""
    if "kernel" in request.keywords and read_probe_mode() is ProbeMode.EVENT:
        wait_until(lambda: not any(map(is_remover, Path("/proc").glob("[0-9]*"))), MAX_REMOVAL_S)


def is_remover(process):
    try:
        return os.fsencode(UPROBE_TYPE) in (process / "cmdline").read_bytes().split(b"\0")
    except OSError:  # it has just ended
        return False


@pytest.fixture
def data_dir() -> Path:
    return DATA


@pytest.fixture
def collector():
    with open_collector() as one:
        yield one
