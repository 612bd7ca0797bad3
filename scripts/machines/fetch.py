"""Fetches packages of Debian and of PyPI into the user's cache; nothing is installed, and root is not needed.

Debian's own apt does it, with folders of its own, so that proxies hold and signatures are checked.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from scripts.machines.catalog import DEBIAN_ARCH, GUEST_PYTHON, RELEASE

ROOT: Final = Path(__file__).resolve().parents[2]
_MIRROR: Final = "http://deb.debian.org/debian"
_KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TOOLS: Final = {"apt-get": "apt", "dpkg-deb": "dpkg"}


class FetchError(Exception):
    """Something that the machines need could not be had; the message says what and why."""


def run_tool(command: list[str], what: str, cwd: Path | None = None) -> str:
    """Run a program that fetches; returns its output.

    Raises:
        FetchError: It failed; with the last line that it wrote.
    """
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    except OSError as error:
        raise FetchError(f"{what}: {command[0]}: {error.strerror}") from error
    if result.returncode:
        said = [line for line in result.stderr.splitlines() if line.strip()] or ["no reason given"]
        told = next((line for line in said if line.startswith("E: ")), said[-1])
        raise FetchError(f"{what}: {told}")
    return result.stdout


@dataclass(frozen=True, slots=True)
class Package:
    """A package of Debian as its index lists it.

    Attributes:
        name: Its name.
        version: Its version.
        file: What apt calls the file.
    """

    name: str
    version: str
    file: str


def parse_uris(text: str) -> list[Package]:
    """The packages that ``apt-get --print-uris`` lists.

    A URL in quotes, the file's name, its size and its digest a line.
    """
    files = [line.split()[1] for line in text.splitlines() if line.startswith("'")]
    packages = []
    for file in files:
        name, version, _ = file.removesuffix(".deb").split("_")
        packages.append(Package(name, unquote(version), file))
    return packages


class Apt:
    """Debian's packages for one kind of processor.

    Args:
        cache: Where everything is kept.
        arch: The processor, as ``uname -m`` says.
        suites: The suites beside the guest's own that are looked into.
        components: The parts of the archive, blanks between them.

    Raises:
        FetchError: There is no apt here, or no key of Debian's archive.
    """

    def __init__(
        self, cache: Path, arch: str, suites: frozenset[str], components: str = "main"
    ) -> None:
        for tool, package in _TOOLS.items():
            if shutil.which(tool) is None:
                raise FetchError(f"there is no {tool}; install the package {package}")
        if not _KEYRING.exists():
            raise FetchError(f"there is no {_KEYRING}; install the package debian-archive-keyring")
        listed = sorted({RELEASE, *suites})
        self._arch = DEBIAN_ARCH[arch]
        self._components = components
        parts = "+".join([*listed, *components.split()[1:]])
        self._home = cache / "apt" / f"{self._arch}-{parts}"
        self._store = cache / "packages"
        self._options = self._make_home(listed)

    def update(self) -> None:
        """Fetch the indexes.

        Raises:
            FetchError: The mirror cannot be reached.
        """
        # Without this a mirror that cannot be reached is a warning, and old indexes are used.
        strict = ["-o", "APT::Update::Error-Mode=any"]
        run_tool(["apt-get", *self._options, *strict, "update", "-q"], f"packages from {_MIRROR}")

    def resolve(self, *packages: str, suite: str = RELEASE) -> list[Package]:
        """These packages and all that they need, as if nothing was installed.

        Raises:
            FetchError: One of them is unknown.
        """
        command = ["apt-get", *self._options, "-t", suite, "install", "--print-uris", "-q", "-y"]
        told = run_tool(
            [*command, "--no-install-recommends", *packages],
            f"packages {' '.join(packages)} of {suite}",
        )
        return parse_uris(told)

    def download(self, packages: list[Package]) -> list[Path]:
        """The files of these packages; those that are there are not fetched again.

        Raises:
            FetchError: One could not be fetched.
        """
        self._store.mkdir(parents=True, exist_ok=True)
        missing = [one for one in packages if not (self._store / one.file).exists()]
        if missing:
            names = [f"{one.name}={one.version}" for one in missing]
            command = ["apt-get", *self._options, "download", "-q", *names]
            run_tool(command, f"packages from {_MIRROR}", self._store)
        return [self._store / one.file for one in packages]

    def _make_home(self, suites: list[str]) -> list[str]:
        etc, state, cache = (self._home / name for name in ("etc", "state", "cache"))
        for folder in (etc / "preferences.d", state / "lists/partial", cache / "archives/partial"):
            folder.mkdir(parents=True, exist_ok=True)
        lines = [
            f"deb [signed-by={_KEYRING}] {_MIRROR} {suite} {self._components}\n" for suite in suites
        ]
        (etc / "sources.list").write_text("".join(lines), encoding="utf-8")
        (state / "status").touch()
        settings = {
            "Dir::Etc": etc,
            "Dir::State": state,
            "Dir::State::status": state / "status",  # nothing is installed
            "Dir::Cache": cache,
            "APT::Architecture": self._arch,
            "APT::Architectures": self._arch,
            "APT::Sandbox::User": "",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            "Debug::NoLocking": "1",
        }
        return [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]


def fetch_wheels(cache: Path, arch: str) -> Path:
    """A folder with all Python packages that the agent and Fleet need on such a processor, at the versions we pin.

    Raises:
        FetchError: pip could not fetch them.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    wanted = sorted({*project["dependencies"], *optional["agent"], *optional["fleet"]})
    pins = _strip_hashes((ROOT / "requirements/dev.txt").read_text(encoding="utf-8"))
    digest = hashlib.sha256("\n".join([*wanted, pins]).encode()).hexdigest()[:12]
    folder = cache / "wheels" / f"{arch}-{digest}"
    if folder.exists():
        return folder
    made = folder.with_suffix(".part")
    shutil.rmtree(made, ignore_errors=True)
    made.parent.mkdir(parents=True, exist_ok=True)
    constraints = cache / f"pins-{digest}.txt"
    constraints.write_text(pins, encoding="utf-8")
    command = [*_find_installer(arch), "--target", str(made), "-c", str(constraints), *wanted]
    run_tool(command, f"Python packages for {arch}")
    made.rename(folder)
    return folder


def _strip_hashes(pinned: str) -> str:
    lines = [line for line in pinned.splitlines() if not line.lstrip().startswith("--hash")]
    return "\n".join(line.rstrip(" \\") for line in lines) + "\n"


def _find_installer(arch: str) -> list[str]:
    """The pip of this environment, or uv where the environment was made by it and has none."""
    if importlib.util.find_spec("pip"):
        tags = [f"manylinux_2_{minor}_{arch}" for minor in (28, 17)] + [f"manylinux2014_{arch}"]
        platforms = [part for tag in tags for part in ("--platform", tag)]
        return [
            *(sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"),
            *("--no-compile", "--only-binary=:all:", "--implementation", "cp"),
            *("--python-version", GUEST_PYTHON, *platforms),
        ]
    if uv := shutil.which("uv"):
        return [
            *(uv, "pip", "install", "-q", "--only-binary=:all:"),
            *("--python-version", GUEST_PYTHON, "--python-platform", f"{arch}-manylinux_2_28"),
        ]
    raise FetchError("there is neither pip in this environment nor uv")
