"""What tracing keeps of root once it is known what is asked of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from ingero.agent.capture.kernel.capabilities import (
    Capability,
    drop_capabilities,
    read_capabilities,
)
from ingero.errors import UnsupportedError

_TO_PROBE: Final = frozenset({Capability.BPF, Capability.PERFMON})
_ALWAYS: Final = _TO_PROBE | {
    # Later processes load further libraries: opened through their /proc/PID/map_files or root, and probed.
    Capability.SYS_PTRACE,
    Capability.CHECKPOINT_RESTORE,
    Capability.DAC_READ_SEARCH,
    Capability.IPC_LOCK,  # perf's buffers, where other tools of root use up the limit
}


# Kernels took CAP_SYS_ADMIN for these before they had them, and still do (include/linux/capability.h): it is all that a
# container engine gives which does not know them, as Docker 20.10 of Debian 12.
_FORMERLY_SYS_ADMIN: Final = _TO_PROBE | {Capability.CHECKPOINT_RESTORE}


@dataclass(frozen=True, slots=True)
class Duties:
    """What a trace does besides probing.

    Attributes:
        owns_files: Makes files in a folder of another user and gives them to that user.
        opens_sockets: Makes a socket that belongs to a group.
        runs_program: Ends a program that runs as another user.
        serves: Listens on a port, which may be one below 1024.
        probes_by_events: Probes libraries by perf's events.
    """

    owns_files: bool = False
    opens_sockets: bool = False
    runs_program: bool = False
    serves: bool = False
    probes_by_events: bool = False


def choose_capabilities(duties: Duties, held: Collection[int]) -> frozenset[Capability]:
    """The least that probing and these duties need.

    CAP_SYS_ADMIN is among them only to probe by perf's events, or in place of one that is not held.
    """
    kept = set(_ALWAYS)
    if duties.owns_files:
        kept |= {Capability.CHOWN, Capability.DAC_OVERRIDE, Capability.FOWNER}
    if duties.opens_sockets:
        kept.add(Capability.CHOWN)
    if duties.runs_program:
        kept.add(Capability.KILL)
    if duties.serves:
        kept.add(Capability.NET_BIND_SERVICE)
    if (
        duties.probes_by_events
    ):  # of libraries that later processes load (perf_uprobe_event_init, kernel/events/core.c)
        kept.add(Capability.SYS_ADMIN)
    if not set(held) >= _FORMERLY_SYS_ADMIN:
        kept.add(Capability.SYS_ADMIN)
    return frozenset(kept)


def check_privileges() -> None:
    """Whether BPF programs can be loaded at all.

    Raises:
        UnsupportedError: Neither root nor the two capabilities.
    """
    held = read_capabilities()
    if not (held >= _TO_PROBE or Capability.SYS_ADMIN in held):
        raise UnsupportedError(
            "ingero trace needs root, or CAP_BPF and CAP_PERFMON: it loads BPF programs",
            hint="run it with sudo; `ingero check` shows what is missing, `ingero sim run` needs no root",
        )


def drop_privileges(duties: Duties) -> None:
    """Keep what `choose_capabilities` says, and let no program that is started from here gain more.

    Before any thread is started: each has its own capabilities.

    Raises:
        UnsupportedError: The kernel refuses.
    """
    try:
        drop_capabilities(choose_capabilities(duties, read_capabilities()))
    except OSError as error:
        raise UnsupportedError(f"cannot give up privileges: {error.strerror}") from error
