"""A TCP relay between an agent and a Fleet that can fail as networks do."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from enum import Enum
from typing import Final

from ingero.closing import Closing

_PIECE: Final = 65_536


class Network(Enum):
    """What the network does."""

    PASS = "pass"
    PARTITION = "partition"
    """Nothing arrives in either direction, and neither side learns of it."""
    NO_ANSWERS = "no answers"
    """What is sent arrives, what is answered does not."""
    REFUSE = "refuse"
    """Connections end as soon as they are made, and those that stand end."""


class Relay(Closing):
    """Listens on a port of ``host`` and passes everything on to ``target``, which may change.

    A connection that lost something never carries anything again, as TCP would not skip over it.

    Attributes:
        target: Where to, ``host:port``.
        network: What the network does now.
        delay_s: One-way delay of everything.
        n_bytes: What has arrived from either side.
    """

    def __init__(self, target: str, host: str = "127.0.0.1") -> None:
        self.target = target
        self.network = Network.PASS
        self.delay_s = 0.0
        self.n_bytes = 0
        self._listener = socket.create_server((host, 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.address = "{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection that stands."""
        with self._lock:
            for end in self._open:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = None
            if self.network is not Network.REFUSE:
                host, _, port = self.target.rpartition(":")
                with suppress(OSError):
                    far = socket.create_connection((host, int(port)), timeout=120)
            if far is None:
                near.close()
                continue
            for source, sink, is_answer in ((near, far, False), (far, near, True)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open.add(source)
                threading.Thread(
                    target=self._pass_on, args=(source, sink), kwargs={"is_answer": is_answer},
                    daemon=True,
                ).start()  # fmt: skip

    def _pass_on(self, source: socket.socket, sink: socket.socket, *, is_answer: bool) -> None:
        is_broken = False
        with suppress(OSError):
            while data := source.recv(_PIECE):
                self.n_bytes += len(data)
                if self.delay_s:
                    time.sleep(self.delay_s)
                is_broken |= self.network is Network.PARTITION
                is_broken |= self.network is Network.NO_ANSWERS and is_answer
                if not is_broken:
                    sink.sendall(data)
        with self._lock:
            self._open.discard(source)
        if not is_broken:
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
        source.close()
