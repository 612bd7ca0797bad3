"""A rank whose processor is loaded takes longer for its own work; one whose disk is loaded shares it with readers."""

import os
import re
import select
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from ingero.errors import UnsupportedError
from ingero.sim.cluster.load import (
    N_READERS,
    find_disk_folder,
    open_load,
    reserve_processor,
)
from ingero.sim.cluster.simulated_agent import ReportReader
from ingero.sim.job import WAIT, Job, JobSettings
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_MS

needs_two = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two processors: one is loaded"
)


def own_times_ns(job, reader, n):
    """From the end of each wait to the end of the next one's collective entry: the rank's own part of a step."""
    told = reader.read()[:0]
    while len(told) < 2 * n:
        job.check()
        told = np.concatenate([told, reader.read()])
        select.select([], [], [], 0.001)
    is_wait = told["what"] == WAIT
    ends = (told["mono_ns"] + told["duration_ns"])[:-1][is_wait[:-1]]
    entries = told["mono_ns"][1:][is_wait[:-1]]
    return (entries - ends).astype(np.int64)


@pytest.mark.live
@needs_two
def test_rank_on_a_loaded_processor_works_longer(tmp_path):
    allowed = os.sched_getaffinity(0)
    settings = JobSettings(
        2, tmp_path, step_ns=5 * NS_PER_MS, load_ns=2 * NS_PER_MS, has_reports=True
    )
    reader = ReportReader(settings.report_path(1))
    with reserve_processor() as processor, Job(settings) as job:
        processor.pin(job.pids[1])
        assert os.sched_getaffinity(job.pids[0]) == allowed - {processor.number}
        assert os.sched_getaffinity(job.pids[1]) == {processor.number}
        job.release()
        before_ns = own_times_ns(job, reader, 30)
        processor.start_load()
        reader.read()
        after_ns = own_times_ns(job, reader, 30)
    assert np.median(after_ns) > np.percentile(before_ns, 90)
    assert os.sched_getaffinity(0) == allowed


def test_one_processor_is_not_enough(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    with pytest.raises(UnsupportedError, match="two processors"), reserve_processor():
        pass


def read_from_disk(pid):
    """Bytes that a process had the disk read. Source: proc_pid_io(5)."""
    return int(
        re.search(r"^read_bytes: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)[1]
    )


def readers_of(path):
    """Processes that read this file as load generators do."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().split(b"\0")
        except OSError:  # it ended
            continue
        if words[1:3] == [b"read", str(path).encode()]:
            found.append(int(line.parent.name))
    return found


@pytest.fixture
def disk_folder(tmp_path):
    """Where ``io-hog`` puts a rank's data: on a disk, also where the tests' own files lie in memory."""
    try:
        folder = find_disk_folder() / f"ingero-test-{os.getpid()}"
    except UnsupportedError as error:
        pytest.skip(error.message)
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.live
def test_load_generators_read_the_disk_of_the_rank(disk_folder):
    with open_load({"io-hog"}, disk_folder) as reserved:
        assert reserved.processor is None
        path = reserved.disk.path
        assert (path.parent, path.stat().st_size) == (disk_folder, 64 << 20)
        settings = JobSettings(
            2,
            disk_folder,
            step_ns=NS_PER_MS,
            data={1: path},
            load_bytes=2 * 4096,
            has_reports=True,
        )
        with Job(settings) as job:
            job.release()
            n_before, n_steps = read_from_disk(job.pids[1]), 20
            own_times_ns(job, ReportReader(settings.report_path(1)), n_steps)
            assert read_from_disk(job.pids[1]) - n_before >= (n_steps - 1) * 2 * 4096
            assert read_from_disk(job.pids[0]) < n_steps * 4096
            assert readers_of(path) == []
            reserved.disk.start_load()
            wait_until(lambda: sum(read_from_disk(p) > 0 for p in readers_of(path)) == N_READERS)
            job.check()
    assert readers_of(path) == []


def test_folder_that_takes_no_data_is_told_with_the_reason(tmp_path):
    missing = tmp_path / "missing"
    with (
        pytest.raises(UnsupportedError, match=r"cannot write 64 MiB in .*missing: No such file"),
        open_load({"io-hog"}, missing),
    ):
        pass


def test_temporary_files_in_memory_are_no_disk(tmp_path):
    devices = {Path(folder).stat().st_dev for folder in (tempfile.gettempdir(), "/var/tmp")}
    mounts = tmp_path / "mountinfo"

    def mount(kind):
        line = "22 1 {}:{} / / rw,relatime shared:1 - {} none rw\n"
        lines = [line.format(os.major(device), os.minor(device), kind) for device in devices]
        mounts.write_text("".join(lines))

    mount("ext4")
    assert find_disk_folder(mounts) == Path(tempfile.gettempdir())
    mount("tmpfs")
    with pytest.raises(UnsupportedError, match="needs a disk"):
        find_disk_folder(mounts)
