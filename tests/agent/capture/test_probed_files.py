"""What is remembered of files, where it needs no probes."""

import threading

import pytest

from ingero.agent.capture.discover.processes import open_file
from ingero.agent.capture.probed_files import ProbedFiles
from ingero.agent.capture.probes.targets import ProbeTarget
from ingero.telemetry.clock import SystemClock


class FakeEngine:
    """Has probes at the first byte of each file until they are taken off."""

    def __init__(self):
        self.detached = []

    def find_target(self, file):
        return None if file in self.detached else ProbeTarget(file, "", ("cudart",), ((0, 0),))

    def detach(self, file):
        self.detached.append(file)


def test_a_change_that_another_thread_has_read_of_counts_at_once(tmp_path, monkeypatch):
    library = tmp_path / "libcudart.so"
    library.write_bytes(b"before")
    engine = FakeEngine()
    has_read, is_kept = threading.Event(), threading.Event()
    with ProbedFiles(engine, SystemClock(), lambda: None) as files, open_file(library) as opened:
        changes = files._changes
        read = changes.read

        def read_slowly():
            found = read()
            has_read.set()
            is_kept.wait(0.2)  # in vain: nobody keeps the file before this thread has acted
            return found

        follower = threading.Thread(target=files.release_changed)

        def examine():
            with files.examine(opened, str(library)):
                # So that only the change itself shows, as where the size stays and a new name explains the time.
                monkeypatch.setattr(opened, "is_unchanged", lambda: True)
                library.write_bytes(b"later!")
                monkeypatch.setattr(changes, "read", read_slowly)
                follower.start()
                has_read.wait()
                monkeypatch.setattr(changes, "read", read)

        with pytest.raises(OSError, match="changed while"):
            examine()
        is_kept.set()
        follower.join()
        assert engine.detached == [opened.file]
        assert files.recall(opened) is None
