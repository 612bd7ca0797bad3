"""promtool's opinion of pages that our programs serve (docs/decisions/0078)."""

import re
import subprocess

NAMES_OF_THE_EXISTING_SYSTEM = {
    "gpu_cuda_operation_duration_microseconds",
    "gpu_memcpy_duration_ms",
    "ingero_infer_baseline_mean_ns",
    "ingero_infer_baseline_p95_ns",
    "ingero_infer_kvcache_alloc_age_ms",
    "ingero_infer_step_duration_ns",
    "nccl_collective_duration_ms",
    "nccl_collective_peer_lag_ms_milliseconds",
}
"""Kept for existing dashboards though promtool objects: they are not in base units."""


def promtool(*arguments, **more):
    """Exit status and output."""
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, **more
    )
    return done.returncode, done.stdout + done.stderr


def leave_out(page, names):
    """A page without some families."""
    families = re.split(r"(?m)^(?=# HELP )", page)
    return "".join(one for one in families if one and one.split()[2] not in names)


def check_page(page):
    """What is wrong: promtool exits 0 on all but the names that are kept, and objects to nothing else on the whole page."""
    status, said = promtool("check", "metrics", input=leave_out(page, NAMES_OF_THE_EXISTING_SYSTEM))
    if status or said:
        return said or f"exit status {status}"
    _, said = promtool("check", "metrics", input=page)
    objected = {line.split()[0] for line in said.splitlines() if line}
    return sorted(objected - NAMES_OF_THE_EXISTING_SYSTEM)
