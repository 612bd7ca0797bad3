"""Loading a host probe.

Each of its programs is attached at the first place that the kernel has, whatever became of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ingero.agent.capture.kernel import syscalls
from ingero.agent.capture.kernel.features import count_arguments, describe_kernel, has_name
from ingero.agent.capture.kernel.maps import BpfMap
from ingero.agent.capture.kernel.objects import BpfObject, ProgramRefusedError
from ingero.agent.capture.kernel.perf import LateEvents, PerfEvents
from ingero.agent.capture.probes.host import AttachPoint, HostProbe
from ingero.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Refusal:
    """A program that this kernel does not take.

    Attributes:
        program: Its name.
        reason: Why, and on which kernel.
        costs: What is missing without it.
    """

    program: str
    reason: str
    costs: str


@dataclass(frozen=True, slots=True)
class LoadedProbe:
    """A host probe that is loaded, with at least one program.

    Attributes:
        loaded: Its object.
        attach_points: Where programs run that could run at several, by what users would call the place.
        refusals: Programs that are left out.
    """

    loaded: BpfObject
    attach_points: tuple[str, ...]
    refusals: tuple[Refusal, ...]


def load_host_probe(
    probe: HostProbe, shared: Mapping[str, BpfMap] | None = None, *, is_filtered: bool
) -> LoadedProbe:
    """Load a probe's programs, without those that the kernel refuses.

    Args:
        probe: Which.
        shared: Maps that exist already.
        is_filtered: Whether programs that only a filter needs are loaded, too.

    Raises:
        UnsupportedError: Nothing of it can be loaded.
    """
    left_out = set[str]() if is_filtered else set(probe.filtering)
    refusals: list[Refusal] = []
    untried: dict[str, list[AttachPoint]] = {}
    bound: dict[str, str] = {}
    for hook in probe.hooks:
        left_out |= {place.program for place in hook.attach_points}
        if hook.is_for_filter and not is_filtered:
            continue
        untried[hook.costs] = [place for place in hook.attach_points if _has(place)]
        _bind_next(untried, bound, left_out, hook.costs)
        if hook.costs not in bound:
            first = hook.attach_points[0].program
            refusals.append(Refusal(first, _describe(first, "it has no such place"), hook.costs))
    while True:
        try:
            loaded = BpfObject(probe.name, shared=shared, left_out=left_out)
        except ProgramRefusedError as error:
            if error.program in left_out:
                raise
            left_out.add(error.program)
            costs = next((key for key, name in bound.items() if name == error.program), "")
            if costs and _bind_next(untried, bound, left_out, costs):
                continue
            refusals.append(
                Refusal(error.program, _describe(error.program, error.reason), costs or probe.costs)
            )
            continue
        if not loaded.programs:
            loaded.close()
            raise UnsupportedError("; ".join(one.reason for one in refusals))
        attach_points = {
            place.program: place.description for hook in probe.hooks for place in hook.attach_points
        }
        return LoadedProbe(
            loaded, tuple(attach_points[name] for name in bound.values()), tuple(refusals)
        )


def attach_host_probe(
    probe: HostProbe, loaded: LoadedProbe, events: PerfEvents
) -> tuple[list[int], list[Refusal]]:
    """Attach what was loaded.

    Args:
        probe: Which.
        loaded: Its programs.
        events: Software events that are open.

    Returns:
        Links, and the programs that the kernel loads but does not attach.
    """
    links: list[int] = []
    refusals: list[Refusal] = []
    for name, fd in loaded.loaded.programs.items():
        try:
            if name in probe.events:
                links.extend(
                    syscalls.attach_perf_event(fd, event)
                    for event in events.get_software(probe.events[name])
                )
            else:
                links.append(syscalls.attach_tracing(fd))
        except (OSError, UnsupportedError) as error:
            description = (
                error.message if isinstance(error, UnsupportedError) else str(error.strerror)
            )
            reason = _describe(name, description)
            refusals.append(Refusal(name, reason, probe.costs))
    return links, refusals


def attach_late(probe: HostProbe, loaded: BpfObject, late: LateEvents) -> list[int]:
    """Attach programs to software events of processors that came online; one where that is refused stays unreached.

    Returns:
        Links.
    """
    links: list[int] = []
    for name, config in probe.events.items():
        for event, cpu in late.software.get(config, ()) if name in loaded.programs else ():
            try:
                links.append(syscalls.attach_perf_event(loaded.programs[name], event))
            except OSError:
                late.unreached.append(cpu)
    return links


def _bind_next(
    untried: Mapping[str, list[AttachPoint]],
    bound: dict[str, str],
    left_out: set[str],
    costs: str,
) -> bool:
    """Move a hook to the next place that the kernel has; False when there is none."""
    bound.pop(costs, None)
    if not untried[costs]:
        return False
    bound[costs] = untried[costs].pop(0).program
    left_out.discard(bound[costs])
    return True


def _has(place: AttachPoint) -> bool:
    if not has_name(place.needs):
        return False
    return not place.n_arguments or count_arguments(place.needs) >= place.n_arguments


def _describe(program: str, reason: str) -> str:
    return f"program {program!r}, {describe_kernel()}: {reason}"
