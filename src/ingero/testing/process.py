"""A real ``ingero-fleet`` process for a test: started on ports of the kernel's choosing, read through its log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_LISTENS: Final = re.compile(r"ingero\.fleet: (?P<what>\S+(?: \S+)?) listens on (?P<where>\S+)")


class ConfiguredFleet:
    """One process, as a context manager; leaving it ends the process.

    Args:
        config: The configuration file; its endpoints should have port 0.
        overrides: ``--set`` assignments.
        environ: Added to this process's environment.

    Attributes:
        lines: What it has logged so far.
        endpoints: ``receivers.otlp http`` → ``127.0.0.1:40001``, and so on; the latest after a reload.
    """

    def __init__(
        self, config: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        program = "import sys; from ingero.cli.programs.fleet import main; main()"
        self._args = [sys.executable, "-c", program, "--config", str(config)]
        self._args += [part for one in overrides for part in ("--set", one)]
        self._environ = {**os.environ, **(environ or {})}  # noqa: TID251 -- a child needs the parent's
        self.lines: list[str] = []
        self.endpoints: dict[str, str] = {}
        self._changed = threading.Condition()
        self._ended = False

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._args,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=self._environ,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def wait_for_line(self, text: str, *, count: int = 1, timeout_s: float = 30) -> str:
        """Wait until ``count`` lines contain a text; the last of them.

        Raises:
            AssertionError: The process ended or the time passed first; the message has its log.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._having(text)) >= count or self._ended, timeout_s
            )
            found = self._having(text)
        if len(found) < count:
            raise AssertionError(f"no {text!r} in:\n" + "\n".join(self.lines))
        return found[-1]

    def wait_until_running(self) -> Self:
        """Wait until it takes data."""
        self.wait_for_line(" pipelines from ")
        return self

    def signal(self, which: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(which)

    def wait(self, timeout_s: float = 30) -> int:
        """Its exit status, once it has one."""
        return self._process.wait(timeout_s)

    def _having(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                match = _LISTENS.search(line)
                if match is not None:
                    self.endpoints[match["what"]] = match["where"]
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
