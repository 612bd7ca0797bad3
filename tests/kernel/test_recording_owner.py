"""What a recorder makes as root belongs to the user who called sudo: folders, file, log, lock, and files set aside."""

import os
import pwd
import subprocess
import sys

import numpy as np
import pytest
from tests.support.unprivileged import AS_UNPRIVILEGED

from ingero.agent.trace.recorder import Recorder
from ingero.config.invoker import Invoker
from ingero.model.events import EVENT, Source
from ingero.recording.store.rollover import list_aside
from ingero.recording.store.settings import WriterSettings
from ingero.telemetry.clock import SystemClock

pytestmark = pytest.mark.kernel
NOBODY = pwd.getpwnam("nobody")
READ = """
import sys
from pathlib import Path
from ingero.recording.store.reader import load_recording
print(len(load_recording(Path(sys.argv[1])).events))
"""


def rows(n):
    events = np.zeros(n, EVENT)
    events["start_ns"] = 1_767_225_600 * 10**9 + np.arange(n)
    events["pid"], events["source"], events["op"], events["weight"] = 41, Source.CUDA, 3, 1
    return events


def owners(folder):
    return {
        path.relative_to(folder): path.stat().st_uid
        for path in (folder, *folder.rglob("*"))
        if path != folder
    }


@pytest.fixture
def recorder(tmp_path):
    invoker = Invoker(NOBODY.pw_uid, NOBODY.pw_gid, "nobody", str(tmp_path))
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    path = tmp_path / "home/.ingero/ingero.db"
    limits = WriterSettings(rollover_bytes=600_000, rollover_keep=2)
    recorder = Recorder(path, "n", SystemClock(), invoker=invoker, keep_all=True, limits=limits)
    yield recorder
    recorder.close()


def test_every_file_is_the_user_s_while_it_is_written_and_after_it_was_set_aside(
    recorder, tmp_path
):
    for _ in range(6):
        recorder.writer.put_events(rows(3000))
        recorder.writer.flush()
    path = recorder.writer.path
    assert len(list_aside(path)) == 2
    living = owners(tmp_path)
    assert {name.name for name in living} >= {
        "ingero.db",
        "ingero.db-wal",
        "ingero.db-shm",
        "ingero.db.lock",
    }
    assert set(living.values()) == {NOBODY.pw_uid}
    recorder.close()
    assert set(owners(tmp_path).values()) == {NOBODY.pw_uid}


def test_the_user_reads_the_recording_while_root_writes_it(recorder):
    recorder.writer.put_events(rows(100))
    recorder.writer.flush()
    command = [*AS_UNPRIVILEGED, sys.executable, "-c", READ, str(recorder.writer.path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd="/", env=dict(os.environ)
    )
    assert done.stdout == "100\n", done.stderr
