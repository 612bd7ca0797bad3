"""The three ways to probe a call, as a table: what each needs of the kernel, which programs it loads and how they attach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ingero.agent.capture.kernel import syscalls
from ingero.agent.capture.kernel.features import check_kernel, describe_kernel, has_name
from ingero.agent.capture.kernel.objects import BpfObject
from ingero.config.probing import ProbeMode
from ingero.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Way:
    """One way to probe.

    Attributes:
        mode: What users call it.
        says: What is attached.
        costs: What it takes, as ``python -m benchmarks probe_cost`` measures it.
        since: The first Linux that has it.
        needs: A name in the kernel's type information that came with it.
        probe: The stem of ``bpf/<probe>.bpf.c`` that has its programs.
        programs: The programs, each with the attach type to load it for; None is the compiled one.
    """

    mode: ProbeMode
    says: str
    costs: str
    since: str
    needs: str
    probe: str
    programs: Mapping[str, int | None]


WAYS: Final = (
    Way(
        ProbeMode.SESSION,
        "session links",
        "0.9 µs a call, 1.5 µs with its return; none for returns nobody watches",
        "6.13",
        "BPF_TRACE_UPROBE_SESSION",  # not bpf_session_is_return, which came with sessions of kprobes in 6.10
        "calls_session",
        {"calls_session": syscalls.ATTACH_UPROBE_SESSION},
    ),
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


def choose_way(mode: ProbeMode) -> Way:
    """The way that was asked for, or the first that the kernel has.

    Raises:
        UnsupportedError: The kernel does not have it.
    """
    check_kernel()
    for way in WAYS:
        if mode in {way.mode, ProbeMode.AUTO} and has_name(way.needs):
            return way
    asked = next(way for way in WAYS if way.mode is mode)
    raise UnsupportedError(
        f"{describe_kernel()} cannot probe calls by {asked.says}: that needs Linux {asked.since}",
        hint=f"give --probe-mode {ProbeMode.AUTO}, which takes what the kernel has",
    )


def load_calls(way: Way, sizes: Mapping[str, int]) -> BpfObject:
    """The programs of one way, with entries (bytes for a ring) of maps that should not have their compiled size.

    Raises:
        UnsupportedError: The kernel refuses.
    """
    return BpfObject(way.probe, way.programs, sizes=sizes)
