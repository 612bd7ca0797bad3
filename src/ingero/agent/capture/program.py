"""The program that `ingero trace -- PROGRAM` runs: held back until the probes wait for it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.agent.capture.kernel.capabilities import die_with_parent
from ingero.errors import IngeroError

_PATIENCE_MS: Final = 10_000
"""How long a program may take to end after SIGTERM."""
_NOT_STARTED: Final = 127
_DEFAULT_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ)
"""With their default actions in the program. CPython ignores the last two, and exec keeps that."""
_MAX_WORDS: Final = 256
_MAX_PROGRAMS: Final = 8
"""Which are examined before the first runs: the program waits meanwhile."""
_REASONS: Final = {errno.ENOENT: "no such program", errno.EACCES: "not executable"}


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """What to run, and as whom.

    Attributes:
        arguments: The program and its arguments; looked up in PATH.
        environment: Its environment.
        uid: Its user id; the same as ours changes nothing.
        gid: Its group id.
        user: Login name for its further groups; empty for none.
        stdout_fd: Where its standard output goes.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    uid: int
    gid: int
    user: str = ""
    stdout_fd: int = 1


class HeldProgram:
    """A child that exists, so that it can be watched, and has not become the program yet.

    Make it before any thread starts and from the thread that stays: the child is a fork of this process until
    `release`, keeps the privileges of that moment, and is sent SIGTERM when that thread ends in a way that `end` cannot
    follow, such as SIGKILL.

    Args:
        settings: What to run.

    Attributes:
        name: The program, as it was given.
        paths: The file that it will be, then those that it may become: programs that its arguments name, as behind
            ``nice`` or ``sh -c``. Without those that do not exist or may not be executed.
        pid: Its pid.
        exit_code: Its exit status as a shell gives it; None while it runs.
        was_killed: Whether it had to be killed at the end.
        fd: Becomes readable when the program ends.
    """

    def __init__(self, settings: ProgramSettings) -> None:
        read_fd, self._release_fd = os.pipe()
        # Closed by a successful exec, so that what is in it is why there was none.
        self._failure_fd, failure_fd = os.pipe()
        self.name = settings.arguments[0]
        folders = os.pathsep.join(os.get_exec_path(settings.environment))
        self.paths = tuple(_iter_programs(settings.arguments, folders))
        self.exit_code: int | None = None
        self.was_killed = False
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._release_fd)
            _become(settings, read_fd, failure_fd, parent)
        os.close(read_fd)
        os.close(failure_fd)
        self.fd = os.pidfd_open(self.pid)

    def release(self) -> None:
        """Let it become the program."""
        with contextlib.suppress(BrokenPipeError):  # it was killed meanwhile, which `poll` shows
            os.write(self._release_fd, b"x")
        os.close(self._release_fd)
        self._release_fd = -1

    def poll(self) -> int | None:
        """Its exit status as a shell gives it, or None while it runs.

        Raises:
            IngeroError: The program could not be started.
        """
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = code if code >= 0 else 128 - code
                if failure := os.read(self._failure_fd, 16):
                    number = int(failure)
                    reason = _REASONS.get(number, os.strerror(number))
                    raise IngeroError(f"cannot run {self.name!r}: {reason}")
        return self.exit_code

    def end(self) -> None:
        """Ask it to end if it still runs, and kill it if it does not; a program that was never released just goes."""
        if self._release_fd >= 0:
            os.close(self._release_fd)
            self._release_fd = -1
        elif self.exit_code is None:
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGCONT)  # one that is stopped does not notice the other
        if self.exit_code is None:
            self._wait()
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._failure_fd)
            self.fd = self._failure_fd = -1

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        if not poll.poll(_PATIENCE_MS):
            self.was_killed = True
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.exit_code = 128 + (signal.SIGKILL if self.was_killed else signal.SIGTERM)


def _iter_programs(arguments: Sequence[str], folders: str) -> Iterator[Path]:
    """Programs that words of a command line name, the first `_MAX_PROGRAMS`.

    Args:
        arguments: The command line; an argument may be one of its own, as behind ``sh -c``.
        folders: Where programs without a folder are looked for, as in PATH.
    """
    words = (word for argument in arguments for word in (argument, *_split(argument)))
    found = (shutil.which(word, path=folders) for word in itertools.islice(words, _MAX_WORDS))
    paths = dict.fromkeys(Path(path) for path in found if path is not None)
    yield from itertools.islice(paths, _MAX_PROGRAMS)


def _split(argument: str) -> list[str]:
    """The words of an argument that has several, as a shell takes them; none of one that no shell takes."""
    if not any(map(str.isspace, argument)):
        return []
    lexer = shlex.shlex(argument, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:  # a quotation mark without its other
        return []


def _become(settings: ProgramSettings, release_fd: int, failure_fd: int, parent: int) -> None:
    """In the child: wait, take the user's identity, and exec. Never returns."""
    try:
        for number in _DEFAULT_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if os.read(release_fd, 1) != b"x":  # the parent gave up
            os._exit(0)
        if settings.stdout_fd != 1:
            os.dup2(settings.stdout_fd, 1)
        if settings.uid != os.geteuid():
            os.initgroups(settings.user, settings.gid) if settings.user else os.setgroups([])
            os.setgid(settings.gid)
            os.setuid(settings.uid)
        die_with_parent(signal.SIGTERM)  # after the change of user, which would undo it
        if os.getppid() != parent:
            os._exit(0)
        os.execvpe(  # noqa: S606 - the user's own command line
            settings.arguments[0], list(settings.arguments), dict(settings.environment)
        )
    except OSError as error:
        os.write(failure_fd, str(error.errno or errno.EIO).encode())
    finally:
        os._exit(_NOT_STARTED)
