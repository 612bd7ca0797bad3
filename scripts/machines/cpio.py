"""Writes the archive that a kernel unpacks as its first root file system, from packages and folders, without root.

The format is ``newc`` (Documentation/driver-api/early-userspace/buffer-format.rst of the kernel's source): a header of
13 numbers as hexadecimal text, the name, the contents, each padded to four bytes. Archives may follow one another.
"""

from __future__ import annotations

import functools
import importlib.util
import marshal
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

_MAGIC: Final = "070701"
_END: Final = "TRAILER!!!"
# Since 2023 Debian's packages may still name these folders at the top, where they are links.
_MERGED: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def merge_usr(name: str) -> str:
    """The name below ``usr`` of a file that a package puts at the top; others as they are, without a leading slash."""
    name = str(PurePosixPath("/", name)).lstrip("/")
    top, _, rest = name.partition("/")
    return f"usr/{top}/{rest}" if rest and top in _MERGED else name


@functools.cache  # most modules are those of each machine
def compile_module(contents: bytes, name: str) -> bytes | None:
    """Python's bytecode file of a module, which is never compared with its source (PEP 552); None when it is no Python.

    Args:
        contents: The source.
        name: The path at which it will lie.
    """
    try:
        code = compile(contents, f"/{name}", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    unchecked = (1).to_bytes(4, "little")
    head = importlib.util.MAGIC_NUMBER + unchecked + importlib.util.source_hash(contents)
    return head + marshal.dumps(code)


class Archive:
    """An archive that is being written; everything in it belongs to root.

    Args:
        stream: Where to; only written to, in order.
        bytecode_tag: What names the bytecode that goes beside Python modules (``cpython-311``); it must be that of this
            interpreter. Empty for none.
    """

    def __init__(self, stream: BinaryIO, bytecode_tag: str = "") -> None:
        self._stream = stream
        self._tag = bytecode_tag
        self._known: set[str] = set()
        self._n_entries = 0

    def add_layout(self) -> None:
        """The links at the top that a merged ``/usr`` has."""
        for name in _MERGED:
            self.add_folder(f"usr/{name}")
            self.add_link(name, f"usr/{name}")

    def add_folder(self, name: str, mode: int = 0o755) -> None:
        """A folder, and those above it."""
        name = merge_usr(name)
        if name in {"", "."} or name in self._known:
            return
        self._add_parents(name)
        self._write(name, stat.S_IFDIR | mode)

    def add_file(self, name: str, contents: bytes, mode: int = 0o644) -> None:
        """A file; the last of a name counts."""
        name = merge_usr(name)
        self._add_parents(name)
        self._write(name, stat.S_IFREG | mode, contents)
        path = PurePosixPath(name)
        bytecode = compile_module(contents, name) if self._tag and path.suffix == ".py" else None
        if bytecode is not None:
            self.add_file(f"{path.parent}/__pycache__/{path.stem}.{self._tag}.pyc", bytecode)

    def add_link(self, name: str, target: str) -> None:
        """A symbolic link."""
        name = merge_usr(name)
        if name in self._known:
            return
        self._add_parents(name)
        self._write(name, stat.S_IFLNK | 0o777, target.encode())

    def add_console(self) -> None:
        """The device that the kernel opens for its first process."""
        self._add_parents("dev/console")
        self._write("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))

    def add_package(self, stream: BinaryIO, is_wanted: Callable[[str], bool]) -> None:
        """What a Debian package holds, from the ``tar`` stream that ``dpkg-deb --fsys-tarfile`` writes."""
        # Not as a stream: a hard link is read from the entry that it links to.
        with tarfile.open(fileobj=stream, mode="r:") as package:
            for entry in package:
                if not is_wanted(merge_usr(entry.name)):
                    continue
                if entry.isdir():
                    self.add_folder(entry.name, entry.mode)
                elif entry.issym():
                    self.add_link(entry.name, entry.linkname)
                elif entry.isreg() or entry.islnk():
                    opened = package.extractfile(entry)
                    assert opened is not None, entry.name
                    self.add_file(entry.name, opened.read(), entry.mode)

    def add_tree(self, folder: Path, name: str, is_wanted: Callable[[str], bool]) -> None:
        """A folder of this machine, under that name; files keep whether they may be run."""
        for path in sorted(folder.rglob("*")):
            inside = f"{name}/{path.relative_to(folder)}"
            if is_wanted(inside) and path.is_file():
                self.add_file(inside, path.read_bytes(), path.stat().st_mode & 0o777)

    def close(self) -> None:
        """Write the end."""
        self._n_entries = 0
        self._write(_END, 0)

    def _add_parents(self, name: str) -> None:
        parent = str(PurePosixPath(name).parent)
        if parent != ".":
            self.add_folder(parent)

    def _write(
        self, name: str, mode: int, contents: bytes = b"", device: tuple[int, int] = (0, 0)
    ) -> None:
        self._known.add(name)
        self._n_entries += 1
        encoded = name.encode() + b"\0"
        inode = 0 if name == _END else self._n_entries
        # inode, mode, uid, gid, links, time, size, device of the file, device that it is, size of the name, checksum
        numbers = (
            *(inode, mode, 0, 0, 1, 0, len(contents)),
            *(0, 0, *device, len(encoded), 0),
        )
        header = _MAGIC.encode() + b"".join(b"%08x" % number for number in numbers)
        self._stream.write(_pad(header + encoded))
        self._stream.write(_pad(contents))


def _pad(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
