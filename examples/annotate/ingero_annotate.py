"""Tell the Ingero agent of this node what the training loop is doing.

Copy this file; it needs Python's own library only.

    annotator = Annotator(run_id="r7")
    annotator.say(step=41, phase="forward")
    with annotator.span(phase="checkpoint"):
        save()

It never raises and never waits: without an agent, or with one that does not keep up, what is said is dropped
(`n_dropped`). Saying something costs about five microseconds. Names that dashboards know: step, epoch, phase, task_id,
run_id.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

SYSTEM_SOCKET = Path("/run/ingero/annotate.sock")
USER_SOCKET = Path(".ingero/annotate/annotate.sock")
RETRY_S = 5.0
VALUE_MAX_BYTES = 256


class Annotator:
    """Says things of its own process.

    Args:
        path: The agent's socket; by default where agents put it.
        labels: Said along with everything else.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, **labels: object) -> None:
        self.n_dropped = 0
        self._path = None if path is None else Path(path)
        self._labels = labels
        self._connection: socket.socket | None = None
        self._pid = 0
        self._retry_at = 0.0

    def say(self, **labels: object) -> None:
        """From now on this holds, until the same key is said again."""
        self._send({"labels": self._build(labels)})

    @contextlib.contextmanager
    def span(self, **labels: object) -> Iterator[None]:
        """This holds while the block runs."""
        start = time.time_ns()  # noqa: TID251 - the agent takes wall time
        try:
            yield
        finally:
            self._send({
                "labels": self._build(labels),
                "span_start": start,
                "span_end": max(time.time_ns(), start),  # noqa: TID251
            })

    def close(self) -> None:
        """Let go of the socket; saying something opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _build(self, labels: dict[str, object]) -> dict[str, str]:
        return {key: _clean(value) for key, value in {**self._labels, **labels}.items()}

    def _send(self, message: dict[str, object]) -> None:
        pid = os.getpid()
        if pid != self._pid:  # a fork: the connection says who we are, and that was our parent
            self.close()
            self._pid, self._retry_at = pid, 0.0
        if self._connection is None and not self._connect():
            self.n_dropped += 1
            return
        assert self._connection is not None
        # "self" is right in containers too; "pid" is for agents that do not know it.
        line = json.dumps({**message, "pid": pid, "self": True}).encode() + b"\n"
        try:
            sent = self._connection.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self.n_dropped += 1
        except OSError:
            self.n_dropped += 1
            self.close()
        else:
            if sent < len(line):  # the rest of it would become part of the next line
                self.n_dropped += 1
                self.close()

    def _connect(self) -> bool:
        now = time.monotonic()
        if now < self._retry_at:
            return False
        self._retry_at = now + RETRY_S
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(0)
            connection.connect(str(self._path or _find_socket()))
        except OSError:
            connection.close()
            return False
        self._connection = connection
        return True


def _find_socket() -> Path:
    return SYSTEM_SOCKET if SYSTEM_SOCKET.is_socket() else Path.home() / USER_SOCKET


def _clean(value: object) -> str:
    text = "".join(character if character.isprintable() else " " for character in str(value))
    return text.encode("utf-8", "replace")[:VALUE_MAX_BYTES].decode("utf-8", "ignore")
