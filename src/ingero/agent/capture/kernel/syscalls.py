"""The bpf() system call: maps, raw tracepoints and uprobe links. No libbpf here.

Layouts follow ``union bpf_attr`` in include/uapi/linux/bpf.h (Linux 6.13); command and attach numbers are UAPI.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Sequence
from typing import Final

from ingero.agent.capture.kernel import libc
from ingero.errors import UnsupportedError

MAP_LOOKUP_ELEM: Final = 1
MAP_UPDATE_ELEM: Final = 2
MAP_DELETE_ELEM: Final = 3
RAW_TRACEPOINT_OPEN: Final = 17
MAP_LOOKUP_BATCH: Final = 24
LINK_CREATE: Final = 28

ATTACH_PERF_EVENT: Final = 41
ATTACH_UPROBE_MULTI: Final = 48
ATTACH_UPROBE_SESSION: Final = 57
UPROBE_MULTI_RETURN: Final = 1

_NUMBERS: Final = {"x86_64": 321, "aarch64": 280}
_ATTR_BYTES: Final = 144


class _Elem(ctypes.Structure):
    _fields_ = (
        ("map_fd", ctypes.c_uint32),
        ("key", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("in_batch", ctypes.c_uint64),
        ("out_batch", ctypes.c_uint64),
        ("keys", ctypes.c_uint64),
        ("values", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("map_fd", ctypes.c_uint32),
        ("elem_flags", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


class _RawTracepoint(ctypes.Structure):
    _fields_ = (("name", ctypes.c_uint64), ("prog_fd", ctypes.c_uint32))


class _PerfLink(ctypes.Structure):
    _fields_ = (
        ("prog_fd", ctypes.c_uint32),
        ("target_fd", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("link_flags", ctypes.c_uint32),
        ("cookie", ctypes.c_uint64),
    )


class _UprobeMulti(ctypes.Structure):
    _fields_ = (
        ("prog_fd", ctypes.c_uint32),
        ("target_fd", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("link_flags", ctypes.c_uint32),
        ("path", ctypes.c_uint64),
        ("offsets", ctypes.c_uint64),
        ("ref_ctr_offsets", ctypes.c_uint64),
        ("cookies", ctypes.c_uint64),
        ("cnt", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
    )


def bpf(command: int, attr: ctypes.Structure) -> int:
    """Make one system call.

    Raises:
        OSError: As the kernel says; PermissionError without the privilege.
    """
    number = _NUMBERS.get(platform.machine())
    if number is None:
        raise UnsupportedError(f"bpf() is not known on {platform.machine()}")
    block = ctypes.create_string_buffer(_ATTR_BYTES)
    ctypes.memmove(block, ctypes.addressof(attr), ctypes.sizeof(attr))
    try:
        return libc.call("syscall", number, command, block, _ATTR_BYTES)
    finally:
        ctypes.memmove(ctypes.addressof(attr), block, ctypes.sizeof(attr))


def lookup(map_fd: int, key: bytes, value_bytes: int) -> bytes | None:
    """One value, or None when the key is not there."""
    key_block = ctypes.create_string_buffer(key, len(key))
    value = ctypes.create_string_buffer(value_bytes)
    try:
        bpf(
            MAP_LOOKUP_ELEM,
            _Elem(map_fd, ctypes.addressof(key_block), ctypes.addressof(value), 0),
        )
    except FileNotFoundError:
        return None
    return value.raw


def update(map_fd: int, key: bytes, value: bytes) -> None:
    """Write one value, new or not."""
    key_block = ctypes.create_string_buffer(key, len(key))
    value_block = ctypes.create_string_buffer(value, len(value))
    bpf(
        MAP_UPDATE_ELEM,
        _Elem(map_fd, ctypes.addressof(key_block), ctypes.addressof(value_block), 0),
    )


def delete(map_fd: int, key: bytes) -> bool:
    """Remove one key; False when it was not there."""
    key_block = ctypes.create_string_buffer(key, len(key))
    try:
        bpf(MAP_DELETE_ELEM, _Elem(map_fd, ctypes.addressof(key_block), 0, 0))
    except FileNotFoundError:
        return False
    return True


def lookup_batch(
    map_fd: int, sizes: tuple[int, int], max_entries: int
) -> tuple[bytearray, bytearray, int]:
    """All entries of a hash map.

    Args:
        map_fd: The map.
        sizes: Bytes of a key and of a value (all CPUs of a per-CPU map, each padded to eight).
        max_entries: The most that the map can hold.

    Returns:
        Keys and values one after another, and how many there are.
    """
    key_bytes, value_bytes = sizes
    keys, values, total = bytearray(), bytearray(), 0
    chunk = min(max_entries, 1024)
    cursor = ctypes.create_string_buffer(max(key_bytes, 8))
    is_first = True
    while True:
        key_block = ctypes.create_string_buffer(key_bytes * chunk)
        value_block = ctypes.create_string_buffer(value_bytes * chunk)
        attr = _Batch(
            in_batch=0 if is_first else ctypes.addressof(cursor),
            out_batch=ctypes.addressof(cursor),
            keys=ctypes.addressof(key_block),
            values=ctypes.addressof(value_block),
            count=chunk,
            map_fd=map_fd,
        )
        is_last = False
        try:
            bpf(MAP_LOOKUP_BATCH, attr)
        except FileNotFoundError:
            is_last = True
        except OSError as error:
            # A hash bucket did not fit (ENOSPC): nothing was copied, ask for more at once.
            if error.errno != errno.ENOSPC or chunk >= 2 * max_entries:
                raise
            chunk *= 2
            continue
        keys += memoryview(key_block)[: key_bytes * attr.count]
        values += memoryview(value_block)[: value_bytes * attr.count]
        total += attr.count
        is_first = False
        if is_last:
            return keys, values, total


def attach_tracing(prog_fd: int) -> int:
    """Attach a ``tp_btf`` or ``fentry`` program to the target it was loaded for; returns a link fd."""
    return bpf(RAW_TRACEPOINT_OPEN, _RawTracepoint(0, prog_fd))


def attach_perf_event(prog_fd: int, event_fd: int, cookie: int = 0) -> int:
    """Run a program whenever a perf event happens; the link keeps the event open. Returns a link fd.

    Args:
        prog_fd: The program.
        event_fd: The event.
        cookie: What ``bpf_get_attach_cookie`` tells the program.
    """
    return bpf(LINK_CREATE, _PerfLink(prog_fd, event_fd, ATTACH_PERF_EVENT, 0, cookie))


def attach_uprobes(
    prog_fd: int,
    path: str,
    probes: Sequence[tuple[int, int]],
    *,
    attach_type: int,
    at_return: bool = False,
) -> int:
    """Attach one program to many functions of one file, in all processes; returns a link fd.

    Args:
        prog_fd: The program.
        path: The file as this process can open it, such as ``/proc/7/root/usr/lib/libx.so``.
        probes: File offset and cookie of each function.
        attach_type: ``ATTACH_UPROBE_SESSION`` or ``ATTACH_UPROBE_MULTI``.
        at_return: With ``ATTACH_UPROBE_MULTI``: probe the returns.
    """
    path_block = ctypes.create_string_buffer(os.fsencode(path))
    offsets = (ctypes.c_uint64 * len(probes))(*(offset for offset, _ in probes))
    cookies = (ctypes.c_uint64 * len(probes))(*(cookie for _, cookie in probes))
    attr = _UprobeMulti(
        prog_fd=prog_fd,
        attach_type=attach_type,
        path=ctypes.addressof(path_block),
        offsets=ctypes.addressof(offsets),
        cookies=ctypes.addressof(cookies),
        cnt=len(probes),
        flags=UPROBE_MULTI_RETURN if at_return else 0,
    )
    return bpf(LINK_CREATE, attr)
