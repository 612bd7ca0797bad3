"""Attaching the programs of one way to the functions of a file."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from ingero.agent.capture.kernel import syscalls
from ingero.agent.capture.kernel.perf import open_uprobe_event, read_uprobe_type
from ingero.agent.capture.probes.targets import ProbeTarget
from ingero.agent.capture.symbols.libraries import FUNCTIONS
from ingero.config.probing import ProbeMode
from ingero.errors import UnsupportedError

Links = list[int]
_Attach = Callable[[Mapping[str, int], str, ProbeTarget], Iterator[int]]


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
    links: Links = []
    try:
        for link in _ATTACH[mode](programs, reach, target):
            links.append(link)
    except OSError as error:
        close_links(links)
        raise UnsupportedError(
            f"cannot probe {target.path}: {error.strerror}", hint=_hint(error, mode)
        ) from error
    return links


def close_links(links: Links) -> None:
    """Remove probes."""
    for link in links:
        os.close(link)
    links.clear()


def leave_links(links: Links) -> None:
    """Have a process of its own remove probes by perf events, and do not wait for it.

    For each of them the kernel waits until no processor can be in its handler (perf_trace_event_unreg, kernel/trace/trace_event_perf.c:
    0.1 s here), one after another; a process that ends would wait for all.
    """
    if not links:
        return
    gate, release = os.pipe()
    for fd in links:
        os.set_inheritable(fd, True)  # noqa: FBT003 - the standard library's
    os.posix_spawn(
        sys.executable,
        (sys.executable, "-I", "-S", "-c", "import os; os.read(0, 1)"),
        {},
        file_actions=(
            (os.POSIX_SPAWN_DUP2, gate, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ),
        setsid=True,
    )
    os.close(gate)
    close_links(links)  # the other process holds them, so this is quick
    os.close(release)


def _hint(error: OSError, mode: ProbeMode) -> str:
    if error.errno == errno.EMFILE and mode is ProbeMode.EVENT:
        return "each probe takes a descriptor: raise the limit (ulimit -Hn)"
    return ""


def _attach_session(programs: Mapping[str, int], reach: str, target: ProbeTarget) -> Iterator[int]:
    yield syscalls.attach_uprobes(
        programs["calls_session"],
        reach,
        target.probes,
        attach_type=syscalls.ATTACH_UPROBE_SESSION,
    )


def _attach_pair(programs: Mapping[str, int], reach: str, target: ProbeTarget) -> Iterator[int]:
    """Two links; the returns come first: an entry without its return would stay on the thread's stack of calls."""
    multi = syscalls.ATTACH_UPROBE_MULTI
    with_return = [probe for probe in target.probes if FUNCTIONS[probe[1]].needs_return]
    if with_return:
        yield syscalls.attach_uprobes(
            programs["calls_return"], reach, with_return, attach_type=multi, at_return=True
        )
    yield syscalls.attach_uprobes(programs["calls_entry"], reach, target.probes, attach_type=multi)


def _attach_events(programs: Mapping[str, int], reach: str, target: ProbeTarget) -> Iterator[int]:
    """Two links for each function, the return's first for the same reason."""
    raise_descriptor_limit()
    kind, path = read_uprobe_type(), os.fsencode(reach)
    for offset, cookie in target.probes:
        for at_return in (True, False) if FUNCTIONS[cookie].needs_return else (False,):
            program = programs["calls_return" if at_return else "calls_entry"]
            event = open_uprobe_event(kind, path, offset, at_return=at_return)
            try:
                link = syscalls.attach_perf_event(program, event, cookie)
            finally:
                os.close(event)
            yield link


def raise_descriptor_limit() -> None:
    """Take as many descriptors as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


_ATTACH: Final[Mapping[ProbeMode, _Attach]] = {
    ProbeMode.SESSION: _attach_session,
    ProbeMode.PAIR: _attach_pair,
    ProbeMode.EVENT: _attach_events,
}
