"""What is probed of PyTorch's ``libtorch_cpu.so``: Gloo's collectives, of releases whose layouts are known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.elf import ElfFile, FileBytes
from ingero.agent.capture.discover.processes import OpenFile
from ingero.agent.capture.kernel.regular_files import open_inside, read_inside
from ingero.agent.capture.probes.exits import open_exit_finder
from ingero.agent.capture.probes.targets import ProbeTarget
from ingero.agent.capture.symbols.gloo import TORCH_VERSIONS
from ingero.agent.capture.symbols.libraries import FUNCTIONS, get_cookies
from ingero.errors import UnsupportedError
from ingero.model.recording import NO_CPU_COLLECTIVES

_VERSION_FILES: Final = (
    # Beside the folder of the library: in PyTorch's package, and in the archive for C++ programs.
    ("version.py", re.compile(r"^__version__\s*=\s*['\"]([^'\"+]+)", re.MULTILINE)),
    ("build-version", re.compile(r"^([^+\s]+)")),
)
_MAX_BYTES: Final = 65_536


def find_torch_version(path: str, root: Path) -> str:
    """The release of the PyTorch that a library belongs to, without what follows a ``+``; empty when it does not say.

    Args:
        path: The library's name inside the process.
        root: The process's root directory, as we see it.
    """
    folder = Path(path).parent.parent
    for name, pattern in _VERSION_FILES:
        try:
            text = read_inside(root, str(folder / name), _MAX_BYTES)
        except OSError:
            continue
        found = pattern.search(text.decode("utf-8", "replace"))
        if found:
            return found[1]
    return ""


def _is_replaced(opened: OpenFile, path: str, root: Path) -> bool:
    """Whether another file has a library's name by now: what stands beside it is about that one."""
    try:
        with OpenFile(open_inside(root, path)) as now:
            return now.file != opened.file
    except OSError:  # the name is gone, or the process is
        return False


def find_torch_target(opened: OpenFile, path: str, root: Path) -> ProbeTarget | None:
    """What to probe in a ``libtorch_cpu.so``; None when it has no Gloo.

    Args:
        opened: The file.
        path: Its name inside the process.
        root: The process's root directory, as we see it.

    Raises:
        UnsupportedError: Where this release of PyTorch keeps what is needed is not known, or its functions cannot be
            decoded. BadDataError: It is no ELF file of 64 bits, or its functions do not look like functions. OSError:
            It cannot be read.
    """
    cookies = get_cookies(is_cxx=True)
    file = FileBytes(opened.fd)
    found = ElfFile(file).find_exported(cookies)
    if not found:
        return None
    if _is_replaced(opened, path, root):
        raise UnsupportedError(
            f"{NO_CPU_COLLECTIVES}: it was replaced on disk since it was loaded, and of which PyTorch it was is not "
            "known; restart the process"
        )
    version = find_torch_version(path, root)
    if version not in TORCH_VERSIONS:
        known = ", ".join(sorted(TORCH_VERSIONS))
        raise UnsupportedError(
            f"{NO_CPU_COLLECTIVES}: it is PyTorch {version or 'of an unknown version'}, and known is {known}"
        )
    missing = sorted(set(cookies) - set(found))
    if missing:
        raise UnsupportedError(f"this PyTorch {version} has no {missing[0]}: Gloo is not probed")
    finder = open_exit_finder(file)
    leaves: set[int] = set()
    for name, offset in found.items():
        if FUNCTIONS[cookies[name]].needs_return:
            leaves |= finder.find(offset)
    probes = {offset: cookies[name] for name, offset in found.items()}
    return ProbeTarget(opened.file, path, ("gloo",), tuple(probes.items()), tuple(sorted(leaves)))
