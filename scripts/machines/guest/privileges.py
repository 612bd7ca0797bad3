"""Checks of the documented sets of capabilities: what `ingero check` says with each is what `ingero trace` then meets."""

from __future__ import annotations

import json
from typing import Final

from scripts.machines.guest.running import INGERO, CheckError, compare, run, sum_calls

from ingero.sim.runner import get_program

# docs/guides/trace.md: for one's own program; and the unit in deploy/systemd.
SETS: Final = {
    "own program": ("bpf", "perfmon"),
    "service": ("bpf", "perfmon", "sys_ptrace", "dac_read_search"),
}
_STEPS: Final = 11
# Without news of mappings a library is found within two seconds, and emulated ones are long.
_WAIT_US: Final = 6_000_000


def _as_nobody(capabilities: tuple[str, ...]) -> tuple[str, ...]:
    given = ",".join(f"+{one}" for one in capabilities)
    return (
        *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
        *(
            f"--bounding-set=-all,{given}",
            f"--inh-caps=-all,{given}",
            f"--ambient-caps=-all,{given}",
        ),
    )


def check_set(name: str) -> str:
    """A user with these capabilities traces a program exactly, and is told beforehand what is missing."""
    user = _as_nobody(SETS[name])
    report = json.loads(run(*user, *INGERO, "check", "--json").out)
    missing = {one["name"]: one["value"] for one in report["checks"] if not one["pass"]}
    blocking = [one["name"] for one in report["checks"] if not one["pass"] and not one["optional"]]
    compare("what `ingero check` misses", blocking, [])
    traced = run(
        *(*user, *INGERO, "trace", "--json", "--no-record", "--no-incidents", "--"),
        *(str(get_program()), "train", f"steps={_STEPS}", f"wait_us={_WAIT_US}"),
    )
    is_late = "processes are searched" in traced.err
    if is_late != ("new mappings" in missing):
        raise CheckError(f"`ingero check` misses {missing}; `ingero trace` says {traced.err}")
    counts = traced.of_type("counts")
    pids = sorted({line["pid"] for line in counts if line["op"] == "cudaLaunchKernel"})
    launches = sum_calls(counts, pids).get(("cuda", "cudaLaunchKernel"), {})
    compare("launches counted", launches.get("seen"), _STEPS * 40)
    return f"{launches['seen']} launches counted" + (", libraries found late" if is_late else "")
