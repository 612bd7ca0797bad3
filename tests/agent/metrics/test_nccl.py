"""Processes that have NCCL loaded are series for as long as they have, whether they call it or not."""

import shutil
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.metrics.exporting import PrometheusPage
from ingero.agent.metrics.nccl import NcclProcesses, find_version
from ingero.sim.runner import get_program

LOADER = (
    "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('loaded', flush=True); sys.stdin.read()"
)


def page_of(watch):
    page = PrometheusPage()
    page.take(tuple(watch.iter_series()), 0)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.render())
        for sample in family.samples
    }


def test_process_is_told_with_path_and_version_until_it_ends(tmp_path):
    library = tmp_path / "libnccl.so.2"
    shutil.copy(get_program().parent / "libnccl.so.2", library)
    with library.open("ab") as file:  # where the real one has it: among its texts
        file.write(b"\0NCCL version 2.28.9+cuda12.9\0")
    watch = NcclProcesses()
    with subprocess.Popen(
        [sys.executable, "-c", LOADER, library],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"LD_LIBRARY_PATH": str(get_program().parent)},
    ) as process:
        process.stdout.readline()
        watch.on_process(ProcessIdentity(process.pid, name="train"))
        watch.scan()
        labels = (
            ("comm", "train"), ("libnccl_path", str(library)), ("libnccl_version", "2.28.9"),
            ("pid", str(process.pid)),
        )  # fmt: skip
        assert page_of(watch) == {
            ("gpu_nccl_process_loaded", labels): 1,
            ("gpu_nccl_processes_total", ()): 1,
        }
        process.stdin.close()
    watch.scan()
    assert page_of(watch) == {("gpu_nccl_processes_total", ()): 0}


def test_process_without_the_library_is_not_told():
    watch = NcclProcesses()
    watch.on_process(ProcessIdentity(1, name="init"))
    watch.scan()
    assert page_of(watch) == {("gpu_nccl_processes_total", ()): 0}


@pytest.mark.parametrize("content", [b"", b"no version in it"])
def test_file_that_tells_no_version_has_none(tmp_path, content):
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(content)
    assert find_version(path) == ""
    assert find_version(tmp_path / "absent") == ""


@pytest.mark.parametrize("before", [0, (1 << 20) - 20, (1 << 20) - 14, (1 << 20) - 1, 3 << 20])
@pytest.mark.parametrize("after", [b"", b"+cuda12.9\0"])
def test_the_version_is_found_wherever_it_lies(tmp_path, before, after):
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(bytes(before) + b"NCCL version 2.28.91" + after)
    assert find_version(path) == "2.28.91"


CUTTER = """
import os, sys
print("ready", flush=True)
while True:
    os.truncate(sys.argv[1], 0)
    os.truncate(sys.argv[1], 16 << 20)
"""
READER = """
import sys
from pathlib import Path
from ingero.agent.metrics.nccl import find_version
for _ in range(100):
    assert find_version(Path(sys.argv[1])) == ""
"""


def test_a_library_that_its_owner_cuts_off_meanwhile_does_no_harm(tmp_path):
    path = tmp_path / "libnccl.so.2"
    path.touch()
    with subprocess.Popen([sys.executable, "-c", CUTTER, path], stdout=subprocess.PIPE) as cutter:
        cutter.stdout.readline()
        try:
            read = subprocess.run([sys.executable, "-c", READER, path], check=False)
        finally:
            cutter.kill()
    assert read.returncode == 0
