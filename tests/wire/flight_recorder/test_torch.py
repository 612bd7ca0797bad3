"""Hangs made here and now with PyTorch itself, dumped by the example that the guide shows."""

import os
import subprocess
from pathlib import Path

import pytest
from benchmarks.hangs.score import RIGHT, judge

from ingero.config.torch import find_torch_python

CASES = ("late_in_a_pair_that_others_wait_for", "frozen_in_the_middle", "healthy_all_reduces")


@pytest.mark.torch
@pytest.mark.slow
def test_real_hangs_are_named_and_a_healthy_job_is_not(tmp_path):
    python = find_torch_python()
    assert python is not None
    subprocess.run(
        [python, "-m", "benchmarks.hangs.make", tmp_path, *CASES],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "HANG_STANDS_S": "4"},
        check=True,
        timeout=110,
    )
    assert {name: judge(tmp_path / name)[0] for name in CASES} == dict.fromkeys(CASES, RIGHT)
