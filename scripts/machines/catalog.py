"""The machines that are booted: which kernel, from which Debian release, for which kind of processor."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

# Debian's names of the processors that `uname -m` names otherwise.
DEBIAN_ARCH: Final = {"x86_64": "amd64", "aarch64": "arm64"}
# The guest's programs come from one release, whatever the kernel: its Python is 3.11, our oldest.
RELEASE: Final = "bookworm"
GUEST_PYTHON: Final = "3.11"


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine that can be booted.

    Attributes:
        name: What the user types.
        arch: Its processor, as ``uname -m`` says.
        suite: The Debian suite that has its kernel.
        package: The package that depends on its kernel.
        checks: Which checks are run there: of what must work, that all is ``refused`` in one line, or of ``rdma``.
        limit_s: Seconds after which the guest is stopped, boot included.
        programs: Packages of the guest beside those of every one.
        modules: Modules of the kernel likewise.
    """

    name: str
    arch: str
    suite: str
    package: str
    checks: str = "supported"
    limit_s: float = 10800.0
    programs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


# The cloud flavour: a third of the size, and the same settings of BPF, perf, probes and BTF.
MACHINES: Final = (
    Machine("6.1-x86_64", "x86_64", "bookworm", "linux-image-cloud-amd64"),
    Machine("6.12-x86_64", "x86_64", "bookworm-backports", "linux-image-cloud-amd64"),
    Machine("newest-x86_64", "x86_64", "sid", "linux-image-cloud-amd64"),
    # RoCE in software, which the cloud flavour lacks; iWARP in software (siw) no kernel of Debian has.
    Machine(
        "newest-x86_64-rdma",
        "x86_64",
        "sid",
        "linux-image-amd64",
        checks="rdma",
        programs=("perftest", "mount"),
        modules=("rdma_rxe", "ib_uverbs", "sch_netem", "tcp_diag"),
    ),
    Machine("5.10-x86_64", "x86_64", "bullseye", "linux-image-cloud-amd64", checks="refused"),
    Machine("6.1-aarch64", "aarch64", "bookworm", "linux-image-cloud-arm64"),
    Machine("6.12-aarch64", "aarch64", "bookworm-backports", "linux-image-cloud-arm64"),
    Machine("6.12-aarch64-16k", "aarch64", "trixie", "linux-image-arm64-16k"),
    Machine("newest-aarch64", "aarch64", "sid", "linux-image-cloud-arm64"),
)


def choose_machines(patterns: str) -> tuple[Machine, ...]:
    """The machines whose names match one of the patterns (``6.12-*``), separated by commas; all without any.

    Raises:
        ValueError: A pattern matches none.
    """
    wanted = [pattern for pattern in patterns.replace(" ", ",").split(",") if pattern]
    for pattern in wanted:
        if not any(fnmatchcase(machine.name, pattern) for machine in MACHINES):
            known = ", ".join(machine.name for machine in MACHINES)
            raise ValueError(f"there is no machine {pattern!r}; one of: {known}")
    return tuple(
        machine
        for machine in MACHINES
        if not wanted or any(fnmatchcase(machine.name, pattern) for pattern in wanted)
    )
