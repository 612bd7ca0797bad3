"""BPF objects: open, share maps, load, and say in plain words why not.

Objects are compiled when the package is built (``bpf/build.py``) and lie beside this module; nothing is compiled here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ingero.agent.capture.kernel._libbpf import get_libbpf
from ingero.agent.capture.kernel.features import allocates_entries
from ingero.agent.capture.kernel.maps import BpfMap
from ingero.closing import Closing
from ingero.errors import UnsupportedError

_REFUSED: Final = re.compile(r"prog '(?P<program>\w+)': (BPF program load failed|failed to )")
"""What libbpf 1.1 and later say (libbpf.c: bpf_object_load_prog, libbpf_prepare_prog_load)."""
_JUDGED: Final = re.compile(
    r"BEGIN PROG LOAD LOG --.*\n(?P<last>[^\n]+)\nprocessed \d+ insns", re.DOTALL
)
"""Why the verifier refuses a program stands before what it processed (verifier.c: print_verification_stats)."""
_HASH: Final = 1  # enum bpf_map_type
_NO_PREALLOC: Final = 1
_MAX_PREALLOCATED_BYTES: Final = 32 << 20
"""Bytes of the keys and values of one map that has them all from the start."""
OBJECTS: Final = Path(__file__).parent / "objects"


def find_object(probe: str, machine: str = "") -> Path:
    """The compiled object of a probe for this (or the named) machine.

    Raises:
        UnsupportedError: It was not built, or not for this machine.
    """
    path = OBJECTS / (machine or platform.machine()) / f"{probe}.bpf.o"
    if not path.exists():
        raise UnsupportedError(
            f"the BPF object {path.name} for {path.parent.name} is not installed",
            hint="in a source tree run `make native`; otherwise install a wheel built for this machine",
        )
    return path


@dataclass(frozen=True, slots=True)
class MapLayout:
    """A map as an object declares it.

    Attributes:
        name: Its name in the C source.
        map_type: ``enum bpf_map_type``.
        key_bytes: Of a key.
        value_bytes: Of a value.
        max_entries: Its capacity; bytes for a ring.
        flags: ``BPF_F_*`` of its creation.
    """

    name: str
    map_type: int
    key_bytes: int
    value_bytes: int
    max_entries: int
    flags: int


def read_map_layouts(probe: str) -> list[MapLayout]:
    """The maps that an object declares; nothing is loaded, and no privilege is needed.

    Raises:
        UnsupportedError: libbpf is missing, or the object is not installed or not readable.
    """
    calls = get_libbpf().calls
    path = find_object(probe)
    handle = calls.bpf_object__open_file(os.fsencode(path), None)
    if not handle:
        reason = os.strerror(ctypes.get_errno())
        raise UnsupportedError(f"cannot open the BPF object {probe!r}: {reason}", hint=f"{path}")
    layouts = []
    pointer = calls.bpf_object__next_map(handle, None)
    while pointer:
        layouts.append(_read_layout(pointer))
        pointer = calls.bpf_object__next_map(handle, pointer)
    calls.bpf_object__close(handle)
    return layouts


def _read_layout(pointer: int) -> MapLayout:
    calls = get_libbpf().calls
    return MapLayout(
        calls.bpf_map__name(pointer).decode(),
        calls.bpf_map__type(pointer),
        calls.bpf_map__key_size(pointer),
        calls.bpf_map__value_size(pointer),
        calls.bpf_map__max_entries(pointer),
        calls.bpf_map__map_flags(pointer),
    )


def preallocate(layout: MapLayout) -> MapLayout:
    """A map as a kernel gets it that is not one of `allocates_entries`.

    There an entry of a hash comes from kmalloc(), which a probe may have interrupted, or which wakes a thread while the
    scheduler holds its locks. So a hash has all entries from the start, and fewer where they are large. Programs at
    perf events are refused otherwise (kernel/bpf/verifier.c: check_map_prog_compatibility).
    """
    if layout.map_type != _HASH or not layout.flags & _NO_PREALLOC:
        return layout
    n_entries, entry_bytes = layout.max_entries, layout.key_bytes + layout.value_bytes
    while n_entries * entry_bytes > _MAX_PREALLOCATED_BYTES:
        n_entries //= 2
    return replace(layout, max_entries=n_entries, flags=layout.flags & ~_NO_PREALLOC)


def find_next_step(code: int, messages: Sequence[str]) -> str:
    """What to do about an object that was not taken.

    Args:
        code: errno; EACCES is also what the verifier says of a program that everybody may load.
        messages: What libbpf wrote.
    """
    judged = _JUDGED.search("\n".join(messages))
    if judged and code != errno.EPERM:
        return f"this kernel's verifier does not take it: {judged['last']}; please report it, with `uname -r`"
    if code in {errno.EPERM, errno.EACCES}:
        return "run as root, or grant CAP_BPF and CAP_PERFMON"
    failures = [line for line in messages if "failed" in line or "libbpf:" in line]
    detail = "; ".join(line.splitlines()[0] for line in failures[-3:])
    return f"see `ingero check`; libbpf said: {detail}" if detail else "see `ingero check`"


class ProgramRefusedError(UnsupportedError):
    """The kernel has not taken one program of an object.

    Args:
        error: What is said of the whole object.
        program: The program.
        reason: Why.
    """

    def __init__(self, error: UnsupportedError, program: str, reason: str) -> None:
        super().__init__(error.message, hint=error.hint)
        self.program = program
        self.reason = reason


class BpfObject(Closing):
    """A loaded object; closing it frees its programs and maps unless a link or a reader holds them.

    Args:
        probe: The stem of ``bpf/<probe>.bpf.c``.
        programs: The programs to load, each with an expected attach type to set, or None to keep the compiled one.
        shared: Maps that exist already, by name; the object uses these in place of its own.
        sizes: Entries (bytes for a ring) of maps that should not have their compiled size.
        left_out: Programs not to load.

    Raises:
        ProgramRefusedError: The kernel refused a program.
        UnsupportedError: libbpf is missing, or the kernel refused a map.
    """

    def __init__(
        self,
        probe: str,
        programs: Mapping[str, int | None] | None = None,
        *,
        shared: Mapping[str, BpfMap] | None = None,
        sizes: Mapping[str, int] | None = None,
        left_out: Collection[str] = (),
    ) -> None:
        self.probe = probe
        self._libbpf = get_libbpf()
        self._calls = self._libbpf.calls
        self._libbpf.messages.clear()
        self._handle = self._calls.bpf_object__open_file(os.fsencode(find_object(probe)), None)
        if not self._handle:
            raise self._refusal("open", ctypes.get_errno())
        try:
            self._leave_out(left_out)
            self._adjust(programs, shared or {}, sizes or {})
            if self._calls.bpf_object__load(self._handle):
                raise self._refusal("load", ctypes.get_errno())
        except UnsupportedError:
            self.close()
            raise
        self.maps: dict[str, BpfMap] = {
            name: BpfMap(name, *self._describe(pointer)) for name, pointer in self._iter("map")
        }
        self.programs: dict[str, int] = {
            name: fd
            for name, pointer in self._iter("program")
            if (fd := self._calls.bpf_program__fd(pointer)) >= 0
        }

    def _iter(self, kind: str) -> Iterator[tuple[str, int]]:
        next_of = getattr(self._calls, f"bpf_object__next_{kind}")
        name_of = getattr(self._calls, f"bpf_{kind}__name")
        pointer = next_of(self._handle, None)
        while pointer:
            yield name_of(pointer).decode(), pointer
            pointer = next_of(self._handle, pointer)

    def _describe(self, pointer: int) -> tuple[int, tuple[int, int], int, int]:
        calls = self._calls
        return (
            calls.bpf_map__fd(pointer),
            (calls.bpf_map__key_size(pointer), calls.bpf_map__value_size(pointer)),
            calls.bpf_map__max_entries(pointer),
            calls.bpf_map__type(pointer),
        )

    def _leave_out(self, names: Collection[str]) -> None:
        for name, pointer in self._iter("program"):
            if name in names:
                self._calls.bpf_program__set_autoload(pointer, False)  # noqa: FBT003 - C's

    def _adjust(
        self,
        programs: Mapping[str, int | None] | None,
        shared: Mapping[str, BpfMap],
        sizes: Mapping[str, int],
    ) -> None:
        if programs is not None:
            for name, pointer in self._iter("program"):
                self._calls.bpf_program__set_autoload(pointer, name in programs)
                attach_type = programs.get(name)
                if attach_type is not None:
                    self._calls.bpf_program__set_expected_attach_type(pointer, attach_type)
        may_allocate = allocates_entries()
        for name, pointer in self._iter("map"):
            if name in shared:
                self._calls.bpf_map__reuse_fd(pointer, shared[name].fd)
                continue
            if name in sizes:
                self._calls.bpf_map__set_max_entries(pointer, sizes[name])
            if not may_allocate:
                layout = preallocate(_read_layout(pointer))
                self._calls.bpf_map__set_max_entries(pointer, layout.max_entries)
                self._calls.bpf_map__set_map_flags(pointer, layout.flags)

    def _refusal(self, verb: str, code: int) -> UnsupportedError:
        reason = os.strerror(code) if code else "refused"
        error = UnsupportedError(
            f"cannot {verb} the BPF object {self.probe!r}: {reason}",
            hint=find_next_step(code, self._libbpf.messages),
        )
        found = _REFUSED.search("\n".join(self._libbpf.messages))
        return ProgramRefusedError(error, found["program"], reason) if found else error

    def subset(self, names: Collection[str]) -> dict[str, BpfMap]:
        """The named maps, to share with another object."""
        return {name: self.maps[name] for name in names}

    def close(self) -> None:
        """Free the object; safe to call twice."""
        if self._handle:
            self._calls.bpf_object__close(self._handle)
            self._handle = None
