"""Tests of one group run in one process: kernel tests that ran side by side would see each other's processes."""

import os
import subprocess
import sys

MODULE = """
import os, pathlib, pytest

@pytest.mark.xdist_group("alone")
@pytest.mark.parametrize("number", range(5))
def test_who(number):
    pathlib.Path(os.environ["SEEN"]).open("a").write(os.environ["PYTEST_XDIST_WORKER"] + " ")
"""


def test_tests_of_a_group_share_one_process(tmp_path):
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(MODULE)
    seen = tmp_path / "seen"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "--dist",
            "loadgroup",
            "-c",
            "/dev/null",
            ".",
        ],
        cwd=tmp_path,
        env={**os.environ, "SEEN": str(seen), "PYTEST_ADDOPTS": ""},
        check=True,
        capture_output=True,
    )
    workers = seen.read_text().split()
    assert len(workers) == 10
    assert len(set(workers)) == 1
