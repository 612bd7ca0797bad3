"""Tiers: a test that needs more than this machine has is skipped with the reason, or fails when it was required.

``INGERO_REQUIRE=kernel,gpu`` names the tiers whose absence is a failure.
"""

import os
import signal
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


def why_not_kernel() -> str:
    if os.geteuid() != 0:
        return "needs root"
    if not Path("/sys/kernel/btf/vmlinux").exists():
        return "needs a kernel with BTF"
    return ""


def why_not_gpu() -> str:
    return "" if Path("/dev/nvidiactl").exists() else "needs an NVIDIA device"


REASONS = {"kernel": why_not_kernel, "gpu": why_not_gpu}


def pytest_configure():
    # A run in the background has SIGINT ignored and its children inherit that; tests interrupt their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
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


@pytest.fixture
def data_dir() -> Path:
    return DATA
