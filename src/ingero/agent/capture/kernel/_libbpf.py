"""The calls of libbpf 1.x that we use, through ctypes: open, adjust and load an object.

Everything after the load (maps, links) is a plain bpf() call in `ingero.agent.capture.kernel.syscalls`, because libbpf
1.1 is older than the session links that we need. Source of the prototypes: libbpf 1.1 ``libbpf.h``.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from dataclasses import dataclass
from typing import Any, Final

from ingero.closing import Closing
from ingero.errors import UnsupportedError

_PRINT_FN: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_LOG_BYTES: Final = 1 << 20
_KEPT_CHARS: Final = 2048
"""Of each end of a message: the reason for which a program is refused is at the end of its log."""
_PTR: Final = ctypes.c_void_p
_INT: Final = ctypes.c_int
_U32: Final = ctypes.c_uint32
_TEXT: Final = ctypes.c_char_p


class _BtfType(ctypes.Structure):
    _fields_ = (
        ("name_off", ctypes.c_uint32),
        ("info", ctypes.c_uint32),
        ("size_or_type", ctypes.c_uint32),
    )


_PROTOTYPES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "libbpf_set_print": (_PTR, (_PRINT_FN,)),
    "bpf_object__open_file": (_PTR, (_TEXT, _PTR)),
    "bpf_object__load": (_INT, (_PTR,)),
    "bpf_object__close": (None, (_PTR,)),
    "bpf_object__next_program": (_PTR, (_PTR, _PTR)),
    "bpf_object__next_map": (_PTR, (_PTR, _PTR)),
    "bpf_program__name": (_TEXT, (_PTR,)),
    "bpf_program__fd": (_INT, (_PTR,)),
    "bpf_program__set_autoload": (_INT, (_PTR, ctypes.c_bool)),
    "bpf_program__set_expected_attach_type": (_INT, (_PTR, _INT)),
    "bpf_map__name": (_TEXT, (_PTR,)),
    "bpf_map__fd": (_INT, (_PTR,)),
    "bpf_map__type": (_INT, (_PTR,)),
    "bpf_map__key_size": (_U32, (_PTR,)),
    "bpf_map__value_size": (_U32, (_PTR,)),
    "bpf_map__max_entries": (_U32, (_PTR,)),
    "bpf_map__map_flags": (_U32, (_PTR,)),
    "bpf_map__set_map_flags": (_INT, (_PTR, _U32)),
    "bpf_map__set_max_entries": (_INT, (_PTR, _U32)),
    "bpf_map__reuse_fd": (_INT, (_PTR, _INT)),
    "btf__load_vmlinux_btf": (_PTR, ()),
    "btf__free": (None, (_PTR,)),
    "btf__find_by_name_kind": (_INT, (_PTR, _TEXT, _U32)),
    "btf__type_by_id": (ctypes.POINTER(_BtfType), (_PTR, _U32)),
}


class Libbpf:
    """libbpf with typed entry points and its last messages kept for error texts."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
        self.calls: Any = library
        self.messages: list[str] = []
        self._vsnprintf = ctypes.CDLL(None).vsnprintf
        self._vsnprintf.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, _PTR)
        self._print = _PRINT_FN(self._keep)
        library.libbpf_set_print(self._print)

    def _keep(self, level: int, fmt: bytes, arguments: int) -> int:
        if level > 1:  # LIBBPF_DEBUG
            return 0
        text = ctypes.create_string_buffer(_LOG_BYTES)
        self._vsnprintf(text, _LOG_BYTES, fmt, arguments)
        message = text.value.decode("utf-8", "replace").strip()
        if len(message) > 2 * _KEPT_CHARS:
            message = f"{message[:_KEPT_CHARS]}\n{message[-_KEPT_CHARS:]}"
        self.messages.append(message)
        del self.messages[:-40]
        return 0


@functools.cache
def get_libbpf() -> Libbpf:
    """Find and open ``libbpf.so.1``.

    Raises:
        UnsupportedError: No libbpf 1.x on this machine; the hint names the package.
    """
    for name in ("libbpf.so.1", ctypes.util.find_library("bpf") or ""):
        if not name:
            continue
        try:
            return Libbpf(ctypes.CDLL(name, use_errno=True))
        except (OSError, AttributeError):
            continue
    raise UnsupportedError(
        "libbpf.so.1 was not found",
        hint="install it: apt-get install libbpf1 (Debian, Ubuntu) or dnf install libbpf (Fedora, RHEL)",
    )


@dataclass(frozen=True, slots=True)
class KernelType:
    """One type of the running kernel.

    Attributes:
        size_or_type: Its size, or the type that it points to or renames.
        n_members: Its members or parameters.
    """

    size_or_type: int
    n_members: int


class KernelTypes(Closing):
    """The types of the running kernel, which take 6 to 15 MB until they are closed.

    Raises:
        UnsupportedError: libbpf is missing, or the kernel has no type information.
    """

    def __init__(self) -> None:
        self._calls = get_libbpf().calls
        self._handle = self._calls.btf__load_vmlinux_btf()
        if not self._handle:
            raise UnsupportedError("libbpf cannot read the kernel's type information")

    def find(self, name: str, kind: int) -> int:
        """The number of a type, 0 when there is none of that name and BTF kind."""
        return max(int(self._calls.btf__find_by_name_kind(self._handle, name.encode(), kind)), 0)

    def get(self, number: int) -> KernelType:
        """A type by its number."""
        found = self._calls.btf__type_by_id(self._handle, number).contents
        return KernelType(found.size_or_type, found.info & 0xFFFF)

    def close(self) -> None:
        """Free them; safe to call twice."""
        self._calls.btf__free(self._handle)
        self._handle = None
