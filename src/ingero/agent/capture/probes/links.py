"""Attaching the programs of one way to the functions of a file."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from ingero.agent.capture.kernel import syscalls
from ingero.agent.capture.kernel.perf import open_uprobe_event, read_uprobe_type
from ingero.agent.capture.probes.leaving import hold_removals, leave_links
from ingero.agent.capture.probes.targets import ProbeTarget
from ingero.agent.capture.symbols.libraries import FUNCTIONS
from ingero.config.environment import ProbeMode
from ingero.errors import UnsupportedError

Links = list[int]
_Probes = Sequence[tuple[int, int]]
_Attach = Callable[[Mapping[str, int], str, _Probes], Iterator[int]]


def attach_file(
    mode: ProbeMode, programs: Mapping[str, int], target: ProbeTarget, reach: str
) -> Links:
    """Probe a file in every process.

    Args:
        mode: The way.
        programs: Descriptors of its programs by name.
        target: What to probe.
        reach: A path that leads to the file now.

    Returns:
        Links; the probes go when these are closed.

    Raises:
        UnsupportedError: The kernel refuses.
    """
    waits = hold_removals() if mode is ProbeMode.EVENT else contextlib.nullcontext()
    try:
        with waits:
            return _collect(_attach(mode, programs, target, reach))
    except OSError as error:
        raise UnsupportedError(
            f"cannot probe {target.path}: {error.strerror}", hint=_hint(error, mode)
        ) from error


def check_probing(mode: ProbeMode, programs: Mapping[str, int]) -> None:
    """Probe a file that nobody runs, to see whether the kernel lets us; the probe is removed at once.

    Args:
        mode: The way.
        programs: Descriptors of its programs by name.

    Raises:
        UnsupportedError: It does not: a capability is missing, or a security module forbids it.
    """
    cookie = next(index for index, function in enumerate(FUNCTIONS) if function.needs_return)
    fd = os.memfd_create("ingero-check")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        links = _collect(_ATTACH[mode](programs, f"/proc/self/fd/{fd}", [(0, cookie)]))
    except OSError as error:
        raise UnsupportedError(
            f"the kernel does not let us probe functions: {error.strerror}", hint=_hint(error, mode)
        ) from error
    finally:
        os.close(fd)
    _REMOVE[mode](links)


def _attach(
    mode: ProbeMode, programs: Mapping[str, int], target: ProbeTarget, reach: str
) -> Iterator[int]:
    """Functions of C by the given way; those of C++ by probes at instructions alone.

    An exception ends the process where a return address was replaced. Last instructions come first, for the reason of
    `_attach_pair`.
    """
    plain = [probe for probe in target.probes if not FUNCTIONS[probe[1]].is_cxx]
    if plain:
        yield from _ATTACH[mode](programs, reach, plain)
    entries = [probe for probe in target.probes if FUNCTIONS[probe[1]].is_cxx]
    leaves = [(offset, 0) for offset in target.leaves]
    for name, probes in (("cxx_leave", leaves), ("cxx_entry", entries)):
        if probes and mode is ProbeMode.EVENT:
            for probe in probes:
                yield _attach_event(programs[name], reach, probe, at_return=False)
        elif probes:
            multi = syscalls.ATTACH_UPROBE_MULTI
            yield syscalls.attach_uprobes(programs[name], reach, probes, attach_type=multi)


def _collect(made: Iterator[int]) -> Links:
    """All of the links, or none.

    Raises:
        OSError: The kernel refuses one.
    """
    links: Links = []
    try:
        for link in made:
            links.append(link)
    except OSError:
        close_links(links)
        raise
    return links


def remove_links(mode: ProbeMode, links: Links) -> None:
    """Remove probes as is best in their way."""
    _REMOVE[mode](links)


def close_links(links: Links) -> None:
    """Remove probes."""
    for link in links:
        os.close(link)
    links.clear()


def _hint(error: OSError, mode: ProbeMode) -> str:
    if error.errno == errno.EMFILE and mode is ProbeMode.EVENT:
        return "each probe takes a descriptor: raise the limit (ulimit -Hn)"
    if error.errno in {errno.EACCES, errno.EPERM} and mode is ProbeMode.EVENT:
        # perf_uprobe_event_init (kernel/events/core.c), and Debian's and Ubuntu's patch of perf_event_open
        return "run as root or grant CAP_SYS_ADMIN: perf events need it, and Linux before 6.6 probes by nothing else"
    return ""


def _attach_session(programs: Mapping[str, int], reach: str, probes: _Probes) -> Iterator[int]:
    yield syscalls.attach_uprobes(
        programs["calls_session"],
        reach,
        probes,
        attach_type=syscalls.ATTACH_UPROBE_SESSION,
    )


def _attach_pair(programs: Mapping[str, int], reach: str, probes: _Probes) -> Iterator[int]:
    """Two links; the returns come first: an entry without its return would stay on the thread's stack of calls."""
    multi = syscalls.ATTACH_UPROBE_MULTI
    with_return = [probe for probe in probes if FUNCTIONS[probe[1]].needs_return]
    if with_return:
        yield syscalls.attach_uprobes(
            programs["calls_return"], reach, with_return, attach_type=multi, at_return=True
        )
    yield syscalls.attach_uprobes(programs["calls_entry"], reach, probes, attach_type=multi)


def _attach_events(programs: Mapping[str, int], reach: str, probes: _Probes) -> Iterator[int]:
    """Two links for each function, the return's first for the same reason."""
    for offset, cookie in probes:
        for at_return in (True, False) if FUNCTIONS[cookie].needs_return else (False,):
            program = programs["calls_return" if at_return else "calls_entry"]
            yield _attach_event(program, reach, (offset, cookie), at_return=at_return)


def _attach_event(program: int, reach: str, probe: tuple[int, int], *, at_return: bool) -> int:
    offset, cookie = probe
    event = open_uprobe_event(read_uprobe_type(), os.fsencode(reach), offset, at_return=at_return)
    try:
        return syscalls.attach_perf_event(program, event, cookie)
    finally:
        os.close(event)


_ATTACH: Final[Mapping[ProbeMode, _Attach]] = {
    ProbeMode.SESSION: _attach_session,
    ProbeMode.PAIR: _attach_pair,
    ProbeMode.EVENT: _attach_events,
}
_REMOVE: Final[Mapping[ProbeMode, Callable[[Links], None]]] = {
    ProbeMode.SESSION: close_links,
    ProbeMode.PAIR: close_links,
    ProbeMode.EVENT: leave_links,
}
