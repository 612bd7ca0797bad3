"""What this machine lets the agent do.

The checks cover every prerequisite, what each missing one costs, and the command that repairs it.

Nothing here changes the machine; programs that are loaded to see whether they load are unloaded at once.
`check_as_traced` runs with the capabilities that a trace keeps, because some kernels refuse then what they grant to
all of root.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import platform
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.cgroups import Cgroups, seen_cgroups
from ingero.agent.capture.discover.identity import parse_cgroup
from ingero.agent.capture.discover.library_paths import iter_installed
from ingero.agent.capture.discover.pid_namespace import FIX, has_host_pids
from ingero.agent.capture.discover.pod_resources import CONTAINER_LOGS, list_containers
from ingero.agent.capture.discover.processes import iter_mappings, iter_pids
from ingero.agent.capture.gpu.driver import CONTROL, has_driver
from ingero.agent.capture.gpu.nvml import Nvml
from ingero.agent.capture.kernel._libbpf import get_libbpf
from ingero.agent.capture.kernel.capabilities import Capability, read_capabilities
from ingero.agent.capture.kernel.features import allocates_entries, describe_kernel
from ingero.agent.capture.kernel.map_memory import reckon_all
from ingero.agent.capture.kernel.maps import count_possible_cpus
from ingero.agent.capture.kernel.objects import find_object
from ingero.agent.capture.kernel.perf import PerfEvents
from ingero.agent.capture.privileges import Duties, check_privileges, drop_privileges
from ingero.agent.capture.probes.engine import Engine, EngineSettings
from ingero.agent.capture.probes.hooks import LoadedProbe, load_host_probe
from ingero.agent.capture.probes.host import PROBES, HostProbe, find_software_events
from ingero.agent.capture.probes.modes import choose_way
from ingero.agent.capture.probes.targets import is_library
from ingero.agent.collectives.plugin import build_setting, find_plugin, find_plugins
from ingero.config.environment import ProbeMode, read_kubelet_socket, read_probe_mode, ring_parent
from ingero.errors import UnsupportedError
from ingero.telemetry.clock import SystemClock
from ingero.units import format_size

_BTF: Final = Path("/sys/kernel/btf/vmlinux")
_NO_ATTACH: Final = 3  # of Yama's scopes: no process may, until the next boot


@dataclass(frozen=True, slots=True)
class Check:
    """One prerequisite.

    Attributes:
        name: What is checked.
        passed: Whether it is there.
        detail: What was found.
        fix: A command or step that repairs it; empty when nothing is to be done.
        costs: What does not work without it; empty when it passed.
        required: Whether `ingero trace` cannot run at all without it.
    """

    name: str
    passed: bool
    detail: str
    fix: str = ""
    costs: str = ""
    required: bool = False


def _present(name: str, detail: str, *, required: bool = False) -> Check:
    return Check(name, passed=True, detail=detail, required=required)


def _missing(name: str, error: UnsupportedError, costs: str, *, required: bool = False) -> Check:
    return Check(
        name, passed=False, detail=error.message, fix=error.hint, costs=costs, required=required
    )


def check_as_traced() -> list[Check]:
    """What `check_machine` finds in a process that opens what a trace opens first, and then keeps what a trace keeps.

    It runs in a process of its own: capabilities do not come back.

    Raises:
        UnsupportedError: The kernel does not let go of a capability.
    """
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as child:
        return child.submit(_check_after_drop).result()


def _check_after_drop() -> list[Check]:
    names = tuple(probe.name for probe in PROBES)
    with contextlib.closing(PerfEvents(find_software_events(names))) as events:
        try:
            by_events = choose_way(read_probe_mode()).mode is ProbeMode.EVENT
        except UnsupportedError:  # `_check_kernel` reports it
            by_events = False
        drop_privileges(Duties(owns_files=True, probes_by_events=by_events))
        return check_machine(events)


def check_machine(events: PerfEvents | None = None) -> list[Check]:
    """Every prerequisite, the necessary ones first.

    Args:
        events: What perf opened with all privileges, and the events of every host probe among it; None opens them now.
    """
    if events is None:
        names = tuple(probe.name for probe in PROBES)
        with contextlib.closing(PerfEvents(find_software_events(names))) as own:
            return check_machine(own)
    return [*(check() for check in CHECKS), _check_mappings(events), *_check_host_probes(events)]


def _check_privileges() -> Check:
    held = read_capabilities()
    names = [one.name for one in Capability if one in held]
    try:
        check_privileges()
        passed = True
    except UnsupportedError:
        passed = False
    return Check(
        "privileges",
        passed,
        "root"
        if os.geteuid() == 0 and passed
        else f"uid {os.geteuid()}, capabilities: {', '.join(names) or 'none'}",
        fix="" if passed else "run it with sudo",
        costs="" if passed else "nothing can be traced; ingero sim, explain and query still work",
        required=True,
    )


def _check_kernel() -> Check:
    try:
        way = choose_way(read_probe_mode())
    except UnsupportedError as error:
        return _missing("kernel", error, "library calls cannot be probed", required=True)
    return _present(
        "kernel", f"{describe_kernel()}: {way.description} ({way.costs})", required=True
    )


def _check_btf() -> Check:
    passed = _BTF.exists()
    return Check(
        "btf",
        passed,
        f"{_BTF} " + (f"({_BTF.stat().st_size >> 20} MiB)" if passed else "is missing"),
        fix=""
        if passed
        else "use a kernel built with CONFIG_DEBUG_INFO_BTF=y (every current distribution's is)",
        costs="" if passed else "no BPF program can be adapted to this kernel",
        required=True,
    )


def _check_libbpf() -> Check:
    try:
        get_libbpf()
    except UnsupportedError as error:
        return _missing("libbpf", error, "no BPF program can be loaded", required=True)
    return _present("libbpf", "libbpf.so.1 found", required=True)


def _check_objects() -> Check:
    try:
        found = find_object("calls")
    except UnsupportedError as error:
        return _missing("bpf objects", error, "there is nothing to load", required=True)
    return _present("bpf objects", f"built for {found.parent.name}", required=True)


def _check_engine() -> Check:
    try:
        with Engine(EngineSettings(host_probes=())) as engine:
            mode = engine.mode
            refused = [f"not {one.name}: {one.reason}" for one in engine.missing]
    except UnsupportedError as error:
        return _missing("probe engine", error, "calls of CUDA and NCCL are not seen", required=True)
    parts = (f"the kernel takes it; mode: {mode}", *refused, describe_memory())
    return _present("probe engine", "; ".join(parts), required=True)


def describe_memory(n_cpus: int = 0) -> str:
    """What all maps and rings take with every probe of the host.

    Args:
        n_cpus: Processors that could be online; 0 for this machine's.
    """
    n_cpus = n_cpus or count_possible_cpus()
    probes = ("calls", *(probe.name for probe in PROBES))
    costs = reckon_all(probes, n_cpus, allocates=allocates_entries())
    at_start = sum(cost.fixed_bytes for cost in costs.values())
    at_most = sum(cost.max_bytes for cost in costs.values())
    later = (
        f" and {format_size(at_most)} at most,"
        f" {format_size(costs['counts'].entry_bytes)} for each operation of each process"
    )
    if at_most == at_start:
        later = ", and nothing is added"
    return (
        f"maps and rings take {format_size(at_start)} at the start{later}"
        f" ({n_cpus} possible processors)"
    )


def _check_mappings(events: PerfEvents) -> Check:
    try:
        _ = events.mappings
    except UnsupportedError as error:
        costs = "a new process is found up to 2 s late, so its first calls are missed"
        return _missing("new mappings", error, costs)
    return _present("new mappings", "perf reports libraries as they are loaded")


def _check_map_files() -> Check:
    mapping = next(iter_mappings(os.getpid()), None)
    path = f"/proc/self/map_files/{mapping.start:x}-{mapping.end:x}" if mapping else ""
    passed = bool(path) and os.access(path, os.R_OK)
    return Check(
        "map_files",
        passed,
        "mapped files can be opened" if passed else "/proc/PID/map_files is not readable",
        fix="" if passed else "grant CAP_CHECKPOINT_RESTORE, or run as root",
        costs=""
        if passed
        else "deleted libraries are not found; others are, through the process's root",
    )


def _check_pids() -> Check:
    passed = has_host_pids()
    return Check(
        "pid namespace",
        passed,
        "the host's" if passed else "not the host's",
        fix="" if passed else FIX,
        costs=""
        if passed
        else "processes have no names, ranks or stacks, and cannot be chosen by their pid",
    )


def _check_ptrace_scope() -> Check:
    """Yama guards /proc/PID/mem, which is opened as if to attach.

    It does not guard /proc/PID/environ, which is only read (ptrace(2)).
    """
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    except OSError:
        return _present("ptrace_scope", "Yama is not active")
    can_trace = Capability.SYS_PTRACE in read_capabilities()
    passed = scope == 0 or (can_trace and scope < _NO_ATTACH)
    fix = "sudo sysctl kernel.yama.ptrace_scope=1, and grant CAP_SYS_PTRACE (root has it)"
    if scope == _NO_ATTACH:
        fix = "set kernel.yama.ptrace_scope below 3 where it is set at boot, and boot again: 3 cannot be lowered"
    costs = "no Python frames in stacks: the memory of processes cannot be read"
    if scope == 1:
        costs += ", but of those that ingero starts"
    return Check(
        "ptrace_scope",
        passed,
        str(scope),
        fix="" if passed else fix,
        costs="" if passed else costs,
    )


def _check_gpu() -> Check:
    version = Path("/proc/driver/nvidia/version")
    passed = has_driver()
    detail = "no NVIDIA device"
    if passed:
        detail = version.read_text().splitlines()[0] if version.exists() else f"{CONTROL} answers"
    return Check(
        "nvidia device",
        passed,
        detail,
        fix="" if passed else "install NVIDIA's driver, or try the simulator: ingero sim run train",
        costs="" if passed else "only the simulator's calls can be traced here",
    )


def _check_nvml() -> Check:
    try:
        nvml = Nvml(SystemClock())
    except UnsupportedError as error:
        costs = "no GPU memory, clocks, throttling, ECC and Xid errors"
        return _missing("nvml", error, costs)
    devices = ", ".join(
        f"{reading.name} ({format_size(reading.memory_total)})"
        if reading.memory_total
        else reading.name
        for reading in nvml.read()
    )
    detail = f"driver {nvml.driver}: {devices or 'no device'}"
    nvml.close()
    return _present("nvml", detail)


def _check_libraries() -> Check:
    installed = {path.name for path in iter_installed()}
    loaded = {
        mapping.path.rpartition("/")[2]
        for pid in iter_pids()
        for mapping in iter_mappings(pid)
        if is_library(mapping)
    }
    names = sorted(installed | loaded)
    return Check(
        "cuda libraries",
        bool(names),
        ", ".join(names) if names else "none installed in the usual places, none loaded now",
        fix="" if names else "nothing to do: a library is found when a process loads it",
        costs="" if names else "nothing to trace until a process loads one",
    )


def _check_nccl_plugin() -> Check:
    try:
        path = find_plugin()
    except UnsupportedError as error:
        costs = "collectives are timed by the host's clock alone"
        return _missing("nccl plug-in", error, costs)
    plugins = find_plugins(ring_parent())
    n_unplaced = sum(one.n_unplaced for one in plugins)
    detail = (
        f"set in a job's environment: {build_setting(path)}, in a container's with the path of a copy there"
        f" (`ingero nccl-plugin install`); processes that have it: {len(plugins)}"
    )
    if n_unplaced:
        detail += f"; communicators beyond its table, on which no hang is seen: {n_unplaced}"
    return _present("nccl plug-in", detail)


def _check_pod_resources() -> Check:
    socket, name = read_kubelet_socket(), "pod resources"
    if not socket.exists() and not any(_is_in_pod(pid) for pid in iter_pids()):
        return _present(name, f"not Kubernetes: no {socket}, and no process runs in a pod")
    try:
        containers = list_containers(socket)
    except UnsupportedError as error:
        costs = "which devices a pod was given is not said of its processes"
        return _missing(name, error, costs)
    n_devices = sum(len(one.devices) for one in containers)
    logs = "are" if CONTAINER_LOGS.is_dir() else "are not"
    return _present(
        name,
        f"the kubelet answers: {len(containers)} containers, {n_devices} devices;"
        f" names of containers {logs} in {CONTAINER_LOGS}",
    )


def _is_in_pod(pid: int) -> bool:
    try:
        _, _, pod, _ = parse_cgroup(seen_cgroups().read(pid))
    except OSError:
        return False
    return bool(pod)


def _check_cgroups(cgroups: Cgroups | None = None, pids: Iterable[int] | None = None) -> Check:
    name, cgroups = "cgroups", cgroups or seen_cgroups()
    unknown = 0
    for pid in pids or iter_pids():
        with contextlib.suppress(OSError):
            unknown += not all(one.path for one in cgroups.read(pid))
    if not unknown:
        return _present(name, "known of every process")
    return Check(
        name,
        passed=False,
        detail=f"those of {unknown} processes are outside of what this container shows",
        fix="mount the host's /sys/fs/cgroup read-only at another place, or give the host's pids and CAP_SYS_PTRACE",
        costs="no limit of their processor time is seen, and no diagnosis names one",
    )


def _check_host_probes(events: PerfEvents) -> list[Check]:
    """Load each host probe once and open its events, so that a refusal is known before it matters."""
    checks = []
    for probe in PROBES:
        try:
            found = load_host_probe(probe, is_filtered=True)
            found.loaded.close()
            for config in probe.events.values():
                events.get_software(config)
            checks.append(_describe_probe(probe, found))
        except UnsupportedError as error:
            checks.append(_missing(f"{probe.name} probe", error, probe.costs))
    return checks


def _describe_probe(probe: HostProbe, found: LoadedProbe) -> Check:
    where = f" (at {', '.join(found.attach_points)})" if found.attach_points else ""
    if not found.refusals:
        return _present(f"{probe.name} probe", probe.description + where)
    return Check(
        f"{probe.name} probe",
        passed=False,
        detail="; ".join(one.reason for one in found.refusals),
        costs="; ".join(one.costs for one in found.refusals),
    )


CHECKS: Final[tuple[Callable[[], Check], ...]] = (
    _check_privileges,
    _check_kernel,
    _check_btf,
    _check_libbpf,
    _check_objects,
    _check_engine,
    _check_map_files,
    _check_pids,
    _check_ptrace_scope,
    _check_gpu,
    _check_nvml,
    _check_libraries,
    _check_nccl_plugin,
    _check_pod_resources,
    _check_cgroups,
)
"""In the order in which they are shown; what perf opens and the host probes follow."""


def collect_support_files() -> dict[str, str]:
    """What a bug report needs, by file name; nothing that identifies a user or holds a secret."""
    files = {
        "kernel.txt": " ".join(platform.uname()._replace(node="-")),
        "os-release.txt": _read("/etc/os-release"),
        "cgroup.txt": _read("/proc/self/cgroup"),
        "cpuinfo.txt": "\n".join(_read("/proc/cpuinfo").split("\n\n")[:1]),
        "meminfo.txt": _read("/proc/meminfo"),
        "nvidia-version.txt": _read("/proc/driver/nvidia/version"),
        "tools.txt": "\n".join(
            f"{tool}: {shutil.which(tool)}" for tool in ("nvidia-smi", "bpftool", "python3")
        ),
    }
    return {name: text for name, text in files.items() if text}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError as error:
        return f"not readable: {error.strerror}\n"
