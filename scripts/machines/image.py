"""Makes what a guest boots: its root file system, held in memory, with Debian's Python, our packages and the checks."""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from scripts.machines.catalog import GUEST_PYTHON, Machine
from scripts.machines.cpio import Archive
from scripts.machines.fetch import ROOT, Apt, FetchError, Package, fetch_wheels, run_tool

# What the guest runs beside Python: libbpf, the tools that `ingero up` makes hosts with, and a shell.
_PACKAGES: Final = ("python3", "libbpf1", "libelf1", "libstdc++6", "iproute2", "util-linux", "dash")
# Only what the kernel itself is made of; its package names tools of the installed system too.
_KERNEL_PACKAGE: Final = re.compile(r"linux-(image|binary|modules)-")
_KERNEL_FILE: Final = re.compile(r"(boot|usr/lib/modules/[^/]+)/(vmlinuz\S*)")
# What `ingero up` makes network namespaces' cables and bridges of.
_MODULES: Final = ("bridge", "veth", "tun")
_MODULE_FILE: Final = re.compile(r"/([\w-]+)\.ko(\.xz)?$")
_NEEDS: Final = re.compile(rb"\0depends=([\w,-]*)\0")
_SITE: Final = "usr/local/lib/python3.11/dist-packages"
# Compiling is slow in a guest; only the same Python's bytecode is of use there.
_TAG: Final = f"cpython-{GUEST_PYTHON.replace('.', '')}"
_BYTECODE: Final = _TAG if sys.implementation.cache_tag == _TAG else ""
_GUEST: Final = Path(__file__).parent / "guest"
# Large, and nothing that a check runs reads it: a guest copies all of its files before it starts.
_UNWANTED: Final = re.compile(
    r"usr/share/(doc|man|locale|info|bash-completion|lintian|perl)/|usr/lib/python3[^/]*/(test|idlelib|tkinter)/"
    r"|/tests?/|/pyarrow|/gconv/|/pydoc_data/|/pygments/lexers/(?!_)|/zstandard/_cffi|\.(h|hpp|pxd|pyx|pyi|a)$"
)


@dataclass(frozen=True, slots=True)
class Image:
    """What QEMU is given.

    Attributes:
        kernel: The kernel.
        initrd: The root file system.
        release: The kernel's release, as its package says.
    """

    kernel: Path
    initrd: Path
    release: str


def _is_wanted(name: str) -> bool:
    return _UNWANTED.search(f"{name}") is None and "__pycache__" not in name


def build_image(machine: Machine, cache: Path, apt: Apt) -> Image:
    """Everything that a machine boots, from the cache where it is there.

    Raises:
        FetchError: Something could not be fetched.
    """
    own = apt.resolve(*_PACKAGES)
    base = _build_base(machine.arch, own, cache, apt)
    resolved = apt.resolve(*_PACKAGES, *machine.programs) if machine.programs else own
    more = [one for one in resolved if one not in own]
    resolved = apt.resolve(machine.package, suite=machine.suite)
    packages = [one for one in resolved if _KERNEL_PACKAGE.match(one.name)]
    folder = cache / "boot" / machine.name
    folder.mkdir(parents=True, exist_ok=True)
    kernel, modules = _unpack_kernel(apt.download(packages), folder, (*_MODULES, *machine.modules))
    initrd = folder / "initrd.cpio"
    shutil.copyfile(base, initrd)
    with initrd.open("ab") as stream:
        _write_programs(stream, apt.download(more))
        _write_overlay(stream, machine.arch, modules, _compile_chain(machine.arch, folder))
    return Image(kernel, initrd, _find_release(packages))


def _compile_chain(arch: str, folder: Path) -> Path:
    """The program of the check of that name, without frame pointers; on arm64 with signed return addresses."""
    target = folder / "chain"
    libraries = ROOT / f"src/ingero/sim/native/{arch}"
    command = [
        *(sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-gnu.2.28", "-O2"),
        *("-fomit-frame-pointer", "-fno-optimize-sibling-calls", "-lpthread"),
        *(("-mbranch-protection=pac-ret",) if arch == "aarch64" else ()),
        *(str(ROOT / "tests/data/stacks/chain.c"), str(libraries / "libcudart.so.12")),
        *(f"-Wl,-rpath,/{_SITE}/ingero/sim/native/{arch}", "-o", str(target)),
    ]
    run_tool(command, "the compiler ziglang")
    return target


def _find_release(packages: Iterable[Package]) -> str:
    return max((one.version for one in packages), key=len, default="")


def _build_base(arch: str, packages: list[Package], cache: Path, apt: Apt) -> Path:
    """The part that is the same until a package changes."""
    wheels = fetch_wheels(cache, arch)
    parts = [
        *(one.file for one in packages),
        wheels.name,
        _BYTECODE,
        Path(__file__).read_text("utf-8"),
    ]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    target = cache / "boot" / f"base-{arch}-{digest}.cpio"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    files = apt.download(packages)
    made = target.with_suffix(".part")
    with made.open("wb") as stream:
        archive = Archive(stream, _BYTECODE)
        archive.add_layout()
        archive.add_console()
        for file in files:
            _add_deb(archive, file)
        archive.add_link("usr/bin/sh", "dash")
        archive.add_tree(wheels, _SITE, _is_wanted)
        archive.close()
    made.rename(target)
    return target


def _add_deb(archive: Archive, file: Path) -> None:
    with _open_deb(file) as stream:
        archive.add_package(stream, _is_wanted)


def _open_deb(file: Path) -> BinaryIO:
    result = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(file)], capture_output=True, check=False
    )
    if result.returncode:
        raise FetchError(f"{file}: {result.stderr.decode().strip()}; remove it and try again")
    return io.BytesIO(result.stdout)


def _unpack_kernel(
    packages: list[Path], folder: Path, wanted: Iterable[str]
) -> tuple[Path, list[bytes]]:
    """The kernel and, in the order in which they are loaded, the modules that the checks need."""
    kernel = folder / "vmlinuz"
    found: dict[str, bytes] = {}
    is_found = False
    for path in packages:
        with _open_deb(path) as stream, tarfile.open(fileobj=stream, mode="r:") as package:
            for entry in package:
                if not entry.isreg():
                    continue
                name = entry.name.removeprefix("./")
                module = _MODULE_FILE.search(name)
                opened = package.extractfile(entry)
                assert opened is not None
                if _KERNEL_FILE.fullmatch(name):
                    kernel.write_bytes(opened.read())
                    is_found = True
                elif module is not None:
                    data = opened.read()
                    found[module[1].replace("-", "_")] = data
    if not is_found:
        names = ", ".join(path.name for path in packages)
        raise FetchError(f"there is no kernel in {names or 'no package at all'}")
    return kernel, _order_modules(found, wanted)


def _order_modules(packed: dict[str, bytes], wanted: Iterable[str]) -> list[bytes]:
    ordered: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in ordered or name not in packed:  # one that is not there is part of the kernel
            return
        data = packed[name]
        if data.startswith(b"\xfd7zXZ"):
            data = lzma.decompress(data)
        needs = _NEEDS.search(data)
        for need in needs[1].decode().split(",") if needs else ():
            add(need.replace("-", "_"))
        ordered[name] = data

    for name in wanted:
        add(name)
    return list(ordered.values())


def _write_programs(stream: BinaryIO, files: list[Path]) -> None:
    """What only some machines have."""
    archive = Archive(stream)
    archive.add_layout()  # a package's folder would take the place of a link
    for file in files:
        _add_deb(archive, file)
    archive.close()


def _write_overlay(stream: BinaryIO, arch: str, modules: list[bytes], chain: Path) -> None:
    """What changes with every edit: our source, what was compiled for that processor, and the checks."""
    others = re.compile(r"/native/(?!" + arch + r"/)[^/]+/")
    archive = Archive(stream, _BYTECODE)
    archive.add_tree(
        ROOT / "src/ingero",
        f"{_SITE}/ingero",
        lambda name: "__pycache__" not in name and others.search(name) is None,
    )
    script = b"#!/usr/bin/python3\nfrom ingero.cli.main import main\nmain()\n"
    archive.add_file("usr/bin/ingero", script, 0o755)
    archive.add_file("etc/passwd", b"root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")
    archive.add_file("etc/group", b"root:x:0:\nnogroup:x:65534:\n")
    archive.add_file("etc/hosts", b"127.0.0.1 localhost\n::1 localhost\n")
    archive.add_folder("root", 0o700)
    for index, module in enumerate(modules):
        archive.add_file(f"modules/{index:02}.ko", module)
    archive.add_tree(_GUEST, "checks/scripts/machines/guest", lambda name: name.endswith(".py"))
    package = _GUEST.parent / "__init__.py"
    archive.add_file("checks/scripts/machines/__init__.py", package.read_bytes())
    archive.add_file("checks/chain", chain.read_bytes(), 0o755)
    archive.add_file("init", (_GUEST / "init.py").read_bytes(), 0o755)
    archive.close()
