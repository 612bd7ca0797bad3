"""Executable mappings as they happen, in every process, through perf's side-band records; and events for BPF programs.

One dummy software event per CPU delivers ``PERF_RECORD_MMAP2`` for each new executable mapping: no tracefs, no kprobe
and no fentry needed. Layouts follow ``struct perf_event_attr`` and the record descriptions in
include/uapi/linux/perf_event.h (Linux 6.13).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ingero.agent.capture.kernel import libc
from ingero.agent.capture.kernel.descriptors import raise_descriptor_limit
from ingero.agent.capture.kernel.maps import parse_cpus
from ingero.errors import UnsupportedError

_NUMBERS: Final = {"x86_64": 298, "aarch64": 241}
_ATTR_BYTES: Final = 112  # PERF_ATTR_SIZE_VER5
_TYPE_SOFTWARE: Final = 1
_COUNT_DUMMY: Final = 9
COUNT_PAGE_FAULTS: Final = 2
COUNT_PAGE_FAULTS_MAJOR: Final = 6
_FLAG_MMAP: Final = 1 << 8
_FLAG_WATERMARK: Final = 1 << 14
_FLAG_MMAP2: Final = 1 << 23
_FD_CLOEXEC: Final = 8
_RECORD_LOST: Final = 2
_RECORD_MMAP2: Final = 10
_DATA_HEAD: Final = 1024  # offset in struct perf_event_mmap_page
_CONFIG1: Final = 56  # of struct perf_event_attr: uprobe_path, and behind it probe_offset
UPROBE_TYPE: Final = Path("/sys/bus/event_source/devices/uprobe/type")
_MAX_RING_BYTES: Final = 256 << 10  # of one processor
_MAX_RINGS_BYTES: Final = 16 << 20  # of all; 256 processors get 64 KiB each, some 600 mappings
_MAX_UPSTREAM_LEVEL: Final = (
    2  # of kernel.perf_event_paranoid; patches of Debian and Ubuntu add 3 and 4
)
ONLINE: Final = Path("/sys/devices/system/cpu/online")
_FIXED: Final = struct.Struct("<IIQQQIIQQII")  # MMAP2 after the header, before the file name


@dataclass(frozen=True, slots=True)
class Mapping:
    """A file that a process mapped as executable.

    Attributes:
        pid: The process, as the agent's pid namespace sees it.
        start: First address.
        end: First address after it.
        device: Major and minor number of the file's device.
        inode: The file.
        path: Its name inside the process's mount namespace.
    """

    pid: int
    start: int
    end: int
    device: tuple[int, int]
    inode: int
    path: str


@dataclass(frozen=True, slots=True)
class LateEvents:
    """What was opened on processors that came online; the descriptors stay those of `PerfEvents`.

    Attributes:
        mappings: Of new mappings, a descriptor for each of the processors.
        software: Of software events, likewise with the processor, by ``PERF_COUNT_SW_*``.
        unreached: Processors on which perf refused what it opened on others.
    """

    mappings: list[int] = field(default_factory=list)
    software: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    unreached: list[int] = field(default_factory=list)


class PerfEvents:
    """The events of perf that a trace needs from its start, opened while the process may open them.

    Kernels of Debian and Ubuntu ask for CAP_SYS_ADMIN to open any event while ``kernel.perf_event_paranoid`` is above
    2; others ask for CAP_PERFMON at most. What is open stays usable when the capability is given up. A refusal is kept
    for the caller. Each event takes a descriptor on each processor.

    Args:
        software: ``PERF_COUNT_SW_*``, each to be opened on every processor.
    """

    def __init__(self, software: Collection[int] = ()) -> None:
        raise_descriptor_limit()
        self._cpus = frozenset(iter_online_cpus())
        self._mappings: MappingStream | UnsupportedError
        try:
            self._mappings = MappingStream()
        except UnsupportedError as error:
            self._mappings = error
        self._software = {config: _open_everywhere(config) for config in software}

    @property
    def mappings(self) -> MappingStream:
        """New executable mappings.

        Raises:
            UnsupportedError: perf refused.
        """
        if isinstance(self._mappings, UnsupportedError):
            raise self._mappings
        return self._mappings

    def get_software(self, config: int) -> tuple[int, ...]:
        """Descriptors of a software event, one per processor; they stay this object's.

        Raises:
            UnsupportedError: perf refused.
        """
        found = self._software[config]
        if isinstance(found, UnsupportedError):
            raise found
        return found

    def open_late(self) -> LateEvents:
        """Open the same on processors that came online since the last time.

        One that went offline took its events with it, so it is one of them when it returns.
        """
        late = LateEvents()
        try:
            online = frozenset(iter_online_cpus())
        except OSError:  # no descriptor is left, say
            return late
        for cpu in sorted(online - self._cpus):
            try:
                self._open_on(cpu, late)
            except OSError:
                late.unreached.append(cpu)
        self._cpus = online
        return late

    def _open_on(self, cpu: int, late: LateEvents) -> None:
        if isinstance(self._mappings, MappingStream):
            late.mappings.append(self._mappings.add(cpu))
        for config, fds in self._software.items():
            if not isinstance(fds, UnsupportedError):
                fd = _open_software(config, cpu)
                self._software[config] = (*fds, fd)
                late.software.setdefault(config, []).append((fd, cpu))

    def close(self) -> None:
        """Close every event; safe to call twice. A link to one keeps its event open."""
        if isinstance(self._mappings, MappingStream):
            self._mappings.close()
        for fds in self._software.values():
            for fd in () if isinstance(fds, UnsupportedError) else fds:
                os.close(fd)
        self._software.clear()


def refuse_events(what: str, error: OSError) -> UnsupportedError:
    """What to say of an event that perf does not open, with the step that helps."""
    try:
        level = int(Path("/proc/sys/kernel/perf_event_paranoid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        level = 0
    is_denied = error.errno in {errno.EACCES, errno.EPERM}
    hint = "run as root or grant CAP_PERFMON"
    if is_denied and level > _MAX_UPSTREAM_LEVEL:
        hint = "run as root, grant CAP_SYS_ADMIN, or: sudo sysctl kernel.perf_event_paranoid=2"
    return UnsupportedError(f"{what}: {error.strerror}", hint=hint)


class MappingStream:
    """Reads new executable mappings of all processes.

    Raises:
        UnsupportedError: perf refuses; the agent then looks at ``/proc`` on a timer.
    """

    def __init__(self) -> None:
        self._n_lost = 0
        self._rings: dict[int, mmap.mmap] = {}
        self._by_cpu: dict[int, int] = {}
        self._lock = threading.Lock()
        cpus = list(iter_online_cpus())
        self._ring_bytes = choose_ring_bytes(len(cpus))
        for cpu in cpus:
            try:
                self.add(cpu)
            except OSError as error:
                self.close()
                raise refuse_events("perf does not report new mappings", error) from error

    def add(self, cpu: int) -> int:
        """Read those of one more processor, or of one again that was offline; the new descriptor. Any thread.

        Raises:
            OSError: perf refuses.
        """
        fd = _open_dummy(cpu)
        try:
            ring = mmap.mmap(fd, mmap.PAGESIZE + self._ring_bytes)
        except OSError:
            os.close(fd)
            raise
        with self._lock:
            before = self._by_cpu.get(cpu)
            if before is not None:
                self._rings.pop(before).close()
                os.close(before)
            self._rings[fd], self._by_cpu[cpu] = ring, fd
        return fd

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that become readable when there is something."""
        return tuple(self._rings)

    def read(self) -> Iterator[Mapping]:
        """Every mapping since the last call."""
        for data in self._take():
            yield from self._decode(data)

    def _take(self) -> list[bytes]:
        """What the rings hold; it is read by then."""
        taken = []
        with self._lock:
            # Of every ring, whether poll() reported it or not: perf forgets that it is readable once it was asked.
            for ring in self._rings.values():
                head, tail = struct.unpack_from("<QQ", ring, _DATA_HEAD)
                if head != tail:
                    taken.append(_unwrap(ring, tail, head))
                    struct.pack_into("<Q", ring, _DATA_HEAD + 8, head)
        return taken

    def pop_n_lost(self) -> int:
        """Mappings since the last time that found the ring full."""
        n_lost, self._n_lost = self._n_lost, 0
        return n_lost

    def _decode(self, data: bytes) -> Iterator[Mapping]:
        position = 0
        while position < len(data):
            kind, _misc, size = struct.unpack_from("<IHH", data, position)
            if kind == _RECORD_MMAP2:
                pid, _, start, length, _, major, minor, inode, *_ = _FIXED.unpack_from(
                    data, position + 8
                )
                name = data[position + 8 + _FIXED.size : position + size].partition(b"\0")[0]
                yield Mapping(pid, start, start + length, (major, minor), inode, os.fsdecode(name))
            elif kind == _RECORD_LOST:
                self._n_lost += int(struct.unpack_from("<QQ", data, position + 8)[1])
            position += size

    def close(self) -> None:
        """Close every event."""
        for fd, ring in self._rings.items():
            ring.close()
            os.close(fd)
        self._rings.clear()
        self._by_cpu.clear()


def choose_ring_bytes(n_cpus: int, page_bytes: int = mmap.PAGESIZE) -> int:
    """Size of the ring of each of so many processors: a power of two, and a page at least, as perf wants it."""
    share = min(_MAX_RING_BYTES, _MAX_RINGS_BYTES // n_cpus)
    return int(max(1 << share.bit_length() - 1, page_bytes))


def iter_online_cpus() -> Iterator[int]:
    """Numbers of the processors that run."""
    text = ONLINE.read_text(encoding="ascii")
    yield from parse_cpus(text)


def _open_everywhere(config: int) -> tuple[int, ...] | UnsupportedError:
    """A software event on every processor; or why not."""
    fds: list[int] = []
    try:
        fds.extend(_open_software(config, cpu) for cpu in iter_online_cpus())
    except OSError as error:
        for fd in fds:
            os.close(fd)
        return refuse_events("perf opens no software event", error)
    return tuple(fds)


def _open_software(config: int, cpu: int) -> int:
    """A software event of one processor, in any process, with each occurrence a sample."""
    attr = bytearray(_ATTR_BYTES)
    struct.pack_into("<IIQQ", attr, 0, _TYPE_SOFTWARE, _ATTR_BYTES, config, 1)
    return _open(attr, cpu)


def read_uprobe_type() -> int:
    """The number of perf's event type for user-space probes (perf_event_open(2), "dynamic PMU").

    Raises:
        UnsupportedError: The kernel has none, or ``/sys`` is not mounted.
    """
    try:
        return int(UPROBE_TYPE.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            "perf has no events for user-space probes",
            hint="mount /sys, and use a kernel with CONFIG_UPROBE_EVENTS=y (every current distribution's is)",
        ) from error


def open_uprobe_event(kind: int, path: bytes, offset: int, *, at_return: bool) -> int:
    """An event that happens where a function of a file is entered, or where it returns, in any process; its descriptor.

    Args:
        kind: As `read_uprobe_type` says.
        path: The file as this process can open it.
        offset: The function's place in the file.
        at_return: The return. Bit 0 of ``config``, as ``/sys/bus/event_source/devices/uprobe/format/retprobe`` says.

    Raises:
        OSError: perf refuses.
    """
    attr = bytearray(_ATTR_BYTES)
    name = ctypes.create_string_buffer(path)
    struct.pack_into("<IIQ", attr, 0, kind, _ATTR_BYTES, int(at_return))
    struct.pack_into("<QQ", attr, _CONFIG1, ctypes.addressof(name), offset)
    # The processor named is where samples would go; a program runs wherever the function is called.
    return _open(attr, next(iter_online_cpus()))


def _open_dummy(cpu: int) -> int:
    attr = bytearray(_ATTR_BYTES)
    struct.pack_into("<IIQ", attr, 0, _TYPE_SOFTWARE, _ATTR_BYTES, _COUNT_DUMMY)
    struct.pack_into("<Q", attr, 40, _FLAG_MMAP | _FLAG_WATERMARK | _FLAG_MMAP2)
    struct.pack_into("<I", attr, 48, 1)  # watermark of one byte: wake the reader at every record
    return _open(attr, cpu)


def _open(attr: bytearray, cpu: int) -> int:
    block = ctypes.create_string_buffer(bytes(attr), _ATTR_BYTES)
    number = _NUMBERS.get(platform.machine(), -1)
    return libc.call("syscall", number, block, -1, cpu, -1, _FD_CLOEXEC)


def _unwrap(ring: mmap.mmap, tail: int, head: int) -> bytes:
    size = len(ring) - mmap.PAGESIZE
    first, last = tail % size, head % size
    base = mmap.PAGESIZE
    if first < last:
        return ring[base + first : base + last]
    return ring[base + first : base + size] + ring[base : base + last]
