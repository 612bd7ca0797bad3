"""The CPython interpreters of this machine, for tests and benchmarks that read their memory."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MINORS: Final = range(9, 15)


@dataclass(frozen=True, slots=True)
class PythonInterpreter:
    """One interpreter.

    Attributes:
        minor: The 11 of 3.11.
        program: Its program file.
        include: The folder of its headers; None when they are not installed.
    """

    minor: int
    program: Path
    include: Path | None


def find_interpreters() -> tuple[PythonInterpreter, ...]:
    """Interpreters of pyenv, of the system and our own, each program once."""
    found: dict[Path, PythonInterpreter] = {}
    for minor in MINORS:
        name = f"python3.{minor}"
        candidates = [
            *sorted((Path.home() / ".pyenv/versions").glob(f"3.{minor}.*/bin/{name}")),
            Path("/usr/bin") / name,
            Path(sys.base_prefix) / "bin" / name,
            *(Path(path) for path in [shutil.which(name)] if path),
        ]
        for path in candidates:
            program = path.resolve()
            # Shims and wrappers are scripts.
            if program.is_file() and program.read_bytes()[:4] == b"\x7fELF":
                include = program.parent.parent / "include" / name
                has_headers = (include / "internal/pycore_runtime.h").exists()
                found.setdefault(
                    program, PythonInterpreter(minor, program, include if has_headers else None)
                )
    return tuple(found.values())
