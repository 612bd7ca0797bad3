"""The three ways to probe a call, as a table, and the programs of one.

The table says what each needs of the kernel, which programs it loads and how they attach.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from ingero.agent.capture.kernel import syscalls
from ingero.agent.capture.kernel.features import (
    check_kernel,
    describe_kernel,
    forget_names,
    has_name,
)
from ingero.agent.capture.kernel.maps import BpfMap
from ingero.agent.capture.kernel.objects import BpfObject
from ingero.agent.capture.probes.links import check_probing
from ingero.agent.capture.probes.targets import ProbeTarget
from ingero.agent.capture.symbols.libraries import FUNCTIONS
from ingero.closing import Closing
from ingero.config.environment import ProbeMode
from ingero.errors import UnsupportedError
from ingero.heap import trim_heap

_CXX: Final = ("cxx_entry", "cxx_leave")
"""Programs of functions of C++, whose returns are never probed. They are in one object for all ways."""
_CXX_PROBE: Final = "calls"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to probe.

    Attributes:
        mode: What users call it.
        description: What is attached.
        costs: What it takes, as ``python -m benchmarks probe_cost`` measures it.
        since: The first Linux that has it.
        needs: A name in the kernel's type information that came with it.
        probe: The stem of ``bpf/<probe>.bpf.c`` that has its programs.
        programs: The programs, each with the attach type to load it for; None is the compiled one. Without those of
            functions of C++.
    """

    mode: ProbeMode
    description: str
    costs: str
    since: str
    needs: str
    probe: str
    programs: Mapping[str, int | None]


_SESSION: Final = Way(
    ProbeMode.SESSION,
    "session links",
    "0.9 µs a call, 1.5 µs with its return; none for returns nobody watches",
    "6.13",
    "BPF_TRACE_UPROBE_SESSION",  # not bpf_session_is_return, which came with sessions of kprobes in 6.10
    "calls_session",
    {"calls_session": syscalls.ATTACH_UPROBE_SESSION},
)
WAYS: Final = (
    # bpf_session_is_return() takes the context since the patches that brought BPF_TRACE_FSESSION.
    replace(_SESSION, since="7.0", needs="BPF_TRACE_FSESSION", probe="calls_session_ctx"),
    _SESSION,
    Way(
        ProbeMode.PAIR,
        "pairs of multi-uprobe links",
        "0.9 µs a call, 1.5 µs with its return",
        "6.6",
        "BPF_TRACE_UPROBE_MULTI",
        "calls",
        dict.fromkeys(("calls_entry", "calls_return"), syscalls.ATTACH_UPROBE_MULTI),
    ),
    Way(
        ProbeMode.EVENT,
        "a perf event for each entry and each return",
        "0.9 µs a call, 1.5 µs with its return; CAP_SYS_ADMIN is kept, and the probes go only seconds after the trace",
        "5.15",
        "BPF_FUNC_get_attach_cookie",
        "calls",
        dict.fromkeys(("calls_entry", "calls_return")),
    ),
)
"""The cheapest first."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A way that the kernel has and does not let us take.

    Attributes:
        way: Which.
        error: Why.
    """

    way: Way
    error: UnsupportedError


def choose_way(mode: ProbeMode) -> Way:
    """The way that was asked for, or the first that the kernel has.

    Raises:
        UnsupportedError: The kernel does not have it.
    """
    return _find_ways(mode)[0]


def _find_ways(mode: ProbeMode) -> list[Way]:
    """The ways that may be taken and that the kernel has, the cheapest first; at least one.

    Raises:
        UnsupportedError: There is none.
    """
    check_kernel()
    found = [way for way in WAYS if mode in {way.mode, ProbeMode.AUTO} and has_name(way.needs)]
    if found:
        return found
    asked = [way for way in WAYS if way.mode is mode][-1]  # the oldest
    raise UnsupportedError(
        f"{describe_kernel()} cannot probe calls by {asked.description}: that needs Linux {asked.since}",
        hint=f"give --probe-mode {ProbeMode.AUTO}, which takes what the kernel has",
    )


def load_calls(mode: ProbeMode, sizes: Mapping[str, int]) -> tuple[Way, BpfObject, list[Refused]]:
    """Load the programs of the first way that the kernel really takes, and try one probe.

    Args:
        mode: The way that was asked for; `ProbeMode.AUTO` for the first that works.
        sizes: Entries (bytes for a ring) of maps that should not have their compiled size.

    Returns:
        The way, its programs, and the ways that should have worked and did not.

    Raises:
        UnsupportedError: None works; why the first does not.
    """
    refused: list[Refused] = []
    for way in _find_ways(mode):
        try:
            return way, _load(way, sizes), refused
        except UnsupportedError as error:
            refused.append(Refused(way, error))
    raise refused[0].error


def _load(way: Way, sizes: Mapping[str, int]) -> BpfObject:
    calls = BpfObject(way.probe, way.programs, sizes=sizes)
    try:
        check_probing(way.mode, calls.programs)
    except UnsupportedError:
        calls.close()
        raise
    return calls


def load_cxx(mode: ProbeMode, maps: Mapping[str, BpfMap]) -> BpfObject:
    """Load the programs of functions of C++.

    Args:
        mode: The way of the others.
        maps: Those of the others, which these use too.

    Raises:
        UnsupportedError: The kernel does not take them.
    """
    attach_type = None if mode is ProbeMode.EVENT else syscalls.ATTACH_UPROBE_MULTI
    # Constants are each object's own.
    shared = {name: one for name, one in maps.items() if not name.endswith(".rodata")}
    return BpfObject(_CXX_PROBE, dict.fromkeys(_CXX, attach_type), shared=shared)


class CallPrograms(Closing):
    """The programs of one way; those of functions of C++ are loaded with the first such function.

    These are half of what the kernel verifies, 0.2 s of a processor, and few processes have such functions.

    Args:
        mode: The way.
        calls: Programs of all other functions, which are closed with this.

    Attributes:
        mode: As given.
        calls: As given.
    """

    def __init__(self, mode: ProbeMode, calls: BpfObject) -> None:
        self.mode, self.calls = mode, calls
        self._lock = threading.Lock()
        self._cxx: BpfObject | None = None

    @property
    def maps(self) -> Mapping[str, BpfMap]:
        """By name; the programs of C++ have the same."""
        return self.calls.maps

    @property
    def programs(self) -> Mapping[str, int]:
        """Descriptors of the programs of all other functions, by name."""
        return self.calls.programs

    def find(self, target: ProbeTarget) -> Mapping[str, int]:
        """Descriptors of the programs that a file needs, by name. Any thread.

        Raises:
            UnsupportedError: The kernel does not take those of C++.
        """
        if not any(FUNCTIONS[cookie].is_cxx for _, cookie in target.probes):
            return self.calls.programs
        with self._lock:
            if self._cxx is None:  # also after a refusal, which may have been for want of memory
                self._cxx = self._load()
            return {**self.calls.programs, **self._cxx.programs}

    def _load(self) -> BpfObject:
        try:
            return load_cxx(self.mode, self.calls.maps)
        finally:
            forget_names()
            trim_heap()  # of the kernel's types, which loading needs

    def close(self) -> None:
        """Free them; safe to call twice."""
        if self._cxx is not None:
            self._cxx.close()
        self.calls.close()
