"""Options of the existing agent's programs that ours do not have: what each means here, or why it means nothing.

Old scripts and unit files keep working: `ingero.cli.arguments` reads `OPTIONS` and turns an old command line into one
of ours. An option that a command has itself is not looked up here.

Source of names and meanings: the existing agent v0.17, its sink and its alerter; the OpenTelemetry Collector 0.140.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ingero.cli.effects import choose_file, copy_errors, log_at, offer_bearer


@dataclass(frozen=True, slots=True)
class OldOption:
    """One option, or several of one meaning.

    Attributes:
        where: The command that had it, and those below it: ``ingero trace``.
        names: As typed, separated by spaces.
        description: What it means here, or why it has no effect and what to use instead; one line.
        takes: What its value is; empty for a switch.
        now: What it becomes, with ``{}`` for its value.
        does: What it does besides; gets the value.
        off: For a switch: what to say to ``=false``; empty for nothing.
        is_refused: It ends the command with what it says.
    """

    where: str
    names: str
    description: str
    takes: str = ""
    now: tuple[str, ...] | None = None
    does: Callable[[str], None] | None = None
    off: str = ""
    is_refused: bool = False

    @property
    def has_effect(self) -> bool:
        """Whether it is obeyed; otherwise it is accepted with a warning."""
        return self.now is not None or self.does is not None


_SNAPSHOTS: Final = (
    "the machine is looked at once a second and each look is recorded; --max-db bounds the file"
)
_NVML: Final = "devices are looked at every 5s through NVML, in a thread of its own"
_PHASES: Final = "prefill and decode are distinguished by what each server's own steps are"
_VISIBLE: Final = "a command line is seen by every user of the machine"

OPTIONS: Final = (
    OldOption("ingero", "--debug", "logs everything on standard error", does=log_at("debug")),
    OldOption(
        "ingero", "--verbose -v", "logs more on standard error; `ingero -v` alone is --version",
        does=log_at("info"),
    ),
    OldOption(
        "ingero", "--config", "the same as INGERO_CONFIG: the file that trace and fleet-push read", "FILE",
        does=choose_file,
    ),
    OldOption(
        "ingero trace", "--nccl", "always so", now=(), off="NCCL calls are always traced; its probes cost "
                                                           "nothing without calls"
    ),
    OldOption(
        "ingero trace", "--libnccl-discovery-interval",
        "a library is probed within milliseconds of being loaded, without a scan", "TIME",
    ),
    OldOption("ingero trace", "--cluster", "the same as --fleet-cluster-id", "NAME", ("--fleet-cluster-id", "{}")),
    OldOption("ingero trace", "--annotate-socket-gid", "the same as --annotate-gid", "GID", ("--annotate-gid", "{}")),
    OldOption("ingero trace", "--otlp-insecure-allow-non-loopback", "--otlp-insecure alone suffices", now=()),
    OldOption("ingero trace", "--deadband", _SNAPSHOTS, "PERCENT"),
    OldOption("ingero trace", "--heartbeat", _SNAPSHOTS, "TIME"),
    OldOption("ingero trace", "--throttle-poll-interval --memfrag-poll-interval", _NVML, "TIME"),
    OldOption(
        "ingero trace", "--stack-samples",
        "each different stack is stored once; --sampling-rate bounds the rows", "N",
    ),
    OldOption("ingero trace", "--py-walker", "one walker reads Python stacks in user space", "auto|ebpf|userspace"),
    OldOption(
        "ingero trace", "--enable-experimental-kprobes",
        "launch sizes come from the CUDA calls and memory from NVML, without probes in the driver",
    ),
    OldOption("ingero trace", "--log", "copies what is printed on standard error into FILE", "FILE", does=copy_errors),
    OldOption(
        "ingero trace", "--inference-kvcache-lineage", "always so with --inference", now=(),
        off="with --inference allocations are followed; their calls are probed in any case",
    ),
    OldOption("ingero trace", "--inference-fingerprint-key", "a server is known by its process and stream"),
    OldOption(
        "ingero trace", "--inference-pause-on-severity",
        "a step that takes too long is never taken for what is usual, so nothing has to pause", "SEVERITY",
    ),
    OldOption(
        "ingero trace", "--inference-sampler-degrade-on",
        "waits and copies are never sampled with --inference, whatever a step takes", "BUCKET",
    ),
    OldOption(
        "ingero trace",
        "--inference-phase-classifier --inference-phase-decode-max-launches --inference-phase-decode-max-memcpy"
        " --inference-phase-prefill-min-launches --inference-phase-prefill-min-avg-kernel"
        " --inference-phase-mixed-memcpy --inference-phase-mixed-launch-low --inference-phase-mixed-launch-high"
        " --inference-phase-memfrag-decode-min",
        _PHASES, "VALUE",
    ),
    OldOption("ingero demo", "--duration -d", "a demo ends by itself", "TIME"),
    OldOption("ingero demo", "--speed", "a synthetic demo waits for nothing; --sim takes as long as its "
                                        "fault", "FACTOR"),
    OldOption("ingero demo", "--stack", "always so", now=(), off="a demo's recording has what its scenario needs"),
    OldOption(
        "ingero query", "--fleet-require-tls", "always so beyond loopback", now=(),
        off="nodes beyond loopback are asked over TLS only; --no-tls speaks plain HTTP to loopback",
    ),
    OldOption("ingero merge", "--clock-skew-threshold", "each node keeps its own clock", "TIME"),
    OldOption(
        "ingero dashboard", "--token", f"the same as INGERO_MCP_BEARER_TOKEN, which is better: {_VISIBLE}", "TOKEN",
        does=offer_bearer,
    ),
    OldOption("ingero mcp", "--log", "copies what is printed on standard error into FILE", "FILE", does=copy_errors),
    OldOption(
        "ingero mcp", "--mcp-bearer-token", f"set INGERO_MCP_BEARER_TOKEN instead: {_VISIBLE}", "TOKEN", is_refused=True
    ),
    OldOption(
        "ingero mcp", "--pagerduty-routing-key", f"set INGERO_PAGERDUTY_KEY instead: {_VISIBLE}", "KEY", is_refused=True
    ),
    OldOption(
        "ingero fleet-push", "--fleet-detection-mode",
        "the mode follows from what Fleet answers and is found anew at each look", "MODE",
    ),
    OldOption("ingero-fleet", "-v", "the same as --version", now=("--version",)),
    OldOption("ingero-fleet", "--feature-gates", "this collector has none", "GATES"),
)  # fmt: skip
"""Every old option, by command."""
