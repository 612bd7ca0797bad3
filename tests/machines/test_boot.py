"""Where guests are booted: not here."""

import shutil

import pytest
from scripts.machines.__main__ import find_cache


def test_guests_are_booted_by_a_command_of_their_own():
    if not (find_cache() / "emulator").is_dir() and shutil.which("qemu-system-x86_64") is None:
        pytest.skip("machines tier: no QEMU here; `make test-machines` fetches it and boots guests")
    pytest.skip("machines tier: takes minutes a guest; `make test-machines` boots them")
