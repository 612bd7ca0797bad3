"""What the running kernel has, by the names in its own type information.

Distributions backport, so a release number tells less.

Source of ``/sys/kernel/btf/vmlinux``: Documentation/bpf/btf.rst. Everybody may read it.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Final

from ingero.agent.capture.kernel._libbpf import KernelTypes
from ingero.errors import UnsupportedError

BTF: Final = Path("/sys/kernel/btf/vmlinux")
FLOOR: Final = "5.15"
"""The oldest Linux that probes of many functions can be distinguished on: ``bpf_get_attach_cookie``."""
_TYPEDEF: Final = 8
_FLOOR_NAME: Final = "BPF_FUNC_get_attach_cookie"


@functools.cache
def _read_types() -> bytes:
    return BTF.read_bytes()


def _read_names() -> bytes:
    return _read_types()


def forget_names() -> None:
    """Give back what `has_name` keeps for the next question, 5 to 10 MB; a later one reads it again."""
    _read_types.cache_clear()


def has_name(name: str) -> bool:
    """Whether a function, type or enumerator of this name is in the kernel's type information.

    Raises:
        UnsupportedError: The kernel has no type information.
    """
    try:
        return b"\0" + name.encode() + b"\0" in _read_names()
    except OSError as error:
        raise UnsupportedError(
            f"{BTF} cannot be read: {error.strerror}",
            hint=f"use Linux {FLOOR} or newer, built with CONFIG_DEBUG_INFO_BTF=y (every current distribution's is)",
        ) from error


def count_arguments(tracepoint: str) -> int:
    """How many arguments a tracepoint of the kernel has.

    Args:
        tracepoint: Its type's name, ``btf_trace_NAME``: a pointer to a function whose first parameter is not an
            argument.

    Raises:
        UnsupportedError: libbpf is missing, or cannot read the kernel's type information.
    """
    with KernelTypes() as types:
        pointer = types.get(types.find(tracepoint, _TYPEDEF)).size_or_type
        return types.get(types.get(pointer).size_or_type).n_members - 1


def allocates_entries() -> bool:
    """Whether programs may add entries to a map that has no memory for them yet, wherever they run: Linux 6.1.

    Raises:
        UnsupportedError: The kernel has no type information.
    """
    return has_name("bpf_mem_alloc")


def describe_kernel() -> str:
    """The running kernel as users call it."""
    return f"Linux {platform.release()}"


def check_kernel() -> None:
    """Whether this kernel is new enough for anything to be probed; needs no privilege.

    Raises:
        UnsupportedError: It is too old, or has no type information.
    """
    if not has_name(_FLOOR_NAME):
        raise UnsupportedError(
            f"{describe_kernel()} is too old to probe libraries", hint=f"use Linux {FLOOR} or newer"
        )
