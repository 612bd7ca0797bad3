"""The policy file of ``ingero-remediator``."""

from __future__ import annotations

import fnmatch
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ingero.config.describe import write_commented
from ingero.config.document import Document, load_document
from ingero.config.model import StrictModel, check_model
from ingero.config.types import Duration, Endpoint
from ingero.remediation.approval_config import ApprovalConfig
from ingero.remediation.confirm_config import ConfirmConfig
from ingero.remediation.kubernetes_config import KubernetesConfig, KubernetesDeviceConfig
from ingero.remediation.urls import Url
from ingero.remediation.webhook_config import SignedWebhookConfig
from ingero.units import parse_duration

DEFAULT_FILE: Final = "/etc/ingero/remediator.yaml"
FORMER_STOP_FILE: Final = "/run/ingero/remediator.stop"
"""The default of earlier versions, in a folder that goes whenever an agent of the machine stops."""
_WEEK_MINUTES: Final = 7 * 24 * 60
DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
NodeCause = Literal[
    "cpu-quota", "cpu-contention", "cpu-steal", "stopped", "blocked-io", "page-faults", "memory-reclaim",
    "more-computing", "gpu-computing",
]  # fmt: skip
"""Causes that a diagnosis can name. Source: `ingero.model.diagnosis.CauseKind`, without the one for none."""
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]


def _read_minutes(text: str) -> int:
    hours, colon, minutes = text.partition(":")
    is_time = colon and len(minutes) == 2 and (hours + minutes).isdecimal()
    if not is_time or int(minutes) > 59 or int(hours) * 60 + int(minutes) > 24 * 60:
        raise ValueError(f"{text!r} is not a time of day; write it in quotes, such as '08:30'")
    return int(hours) * 60 + int(minutes)


def _check_time(text: str) -> str:
    _read_minutes(text)
    return text


TimeOfDay = Annotated[str, AfterValidator(_check_time)]


def _check_pattern(text: str) -> str:
    if not {"[", "]", ","}.isdisjoint(text):
        raise ValueError(
            f"{text!r}: only * and ? match; write the nodes of a range or a list one by one"
        )
    return text


NodePattern = Annotated[str, AfterValidator(_check_pattern)]


class FindingSourceConfig(StrictModel):
    """Where findings come from."""

    admin_url: Url = Field(
        "http://127.0.0.1:8081",
        description="Fleet's admin endpoint. It has no authentication and listens on Fleet's own machine only.",
    )
    clusters: tuple[str, ...] = Field(
        default=(), description="Only these clusters; empty takes each that Fleet knows."
    )
    poll_interval: Duration = Field(
        parse_duration("2s"), gt=0, description="Between two polls of Fleet and the scheduler."
    )
    timeout: Duration = Field(parse_duration("5s"), gt=0, description="Of one request to Fleet.")


class FindingsConfig(StrictModel):
    """What a finding must be before it is acted on. Only culprits are, whatever stands here."""

    max_age: Duration = Field(
        parse_duration("30s"),
        gt=0,
        description="Fleet must have judged, and the rank must have worked, at most this long ago.",
    )
    min_persistence: Duration = Field(
        parse_duration("30s"), description="How long it must have been a culprit without a break."
    )
    min_evidence: float = Field(
        4.0, ge=0, description="log10 of the evidence that the rank is slower than its peers."
    )
    min_slowdown: float = Field(
        1.1, ge=1, description="Times the median peer: 1.1 takes a tenth longer."
    )
    min_lost_gpu_time: Duration = Field(
        parse_duration("10m"), description="GPU time that it has cost the ranks that waited."
    )
    min_peers: int = Field(3, ge=2, description="Ranks that it was compared with, itself included.")
    min_coverage: float = Field(
        0.8, ge=0, le=1, description="Share of the cluster's known nodes that are active."
    )
    require_quorum: bool = Field(default=True, description="Only while Fleet has a quorum.")
    causes: tuple[NodeCause, ...] = Field(
        default=(),
        description="Only once the node's agent has said why its rank is slow, and the first cause is one of these;"
        " empty does not wait for a diagnosis.",
    )


class WindowConfig(StrictModel):
    """Times of a week, in UTC."""

    days: tuple[Day, ...] = Field(default=DAYS, description="Days on which it begins.")
    begin: TimeOfDay = Field("00:00", description="UTC.")
    end: TimeOfDay = Field("24:00", description="UTC; before begin is on the next day.")

    @property
    def begin_minute(self) -> int:
        """Of the day."""
        return _read_minutes(self.begin)

    @property
    def end_minute(self) -> int:
        """Of the day; may be before the beginning."""
        return _read_minutes(self.end)

    def includes(self, wall_ns: int) -> bool:
        """Whether a time, in nanoseconds since the epoch, is in it: its beginning is, its end is not."""
        now = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=wall_ns // 1000)
        minute = now.weekday() * 24 * 60 + now.hour * 60 + now.minute
        begin, end = self.begin_minute, self.end_minute
        length = end - begin if end > begin else end - begin + 24 * 60
        return any(
            (minute - DAYS.index(day) * 24 * 60 - begin) % _WEEK_MINUTES < length
            for day in self.days
        )


class BrakesConfig(StrictModel):
    """What holds actions back, however clear the finding is."""

    max_nodes_at_once: int = Field(
        1, ge=0, description="Nodes out of service by us at once, of all clusters together."
    )
    max_percent_at_once: float = Field(
        10.0, ge=0, le=100, description="Those of one cluster as a share of its known nodes."
    )
    max_nodes_per_hour: int = Field(
        2, ge=0, description="Actions begun within an hour, in all clusters together."
    )
    max_percent_per_hour: float = Field(
        10.0, ge=0, le=100, description="Those in one cluster as a share of its known nodes."
    )
    cool_down: Duration = Field(
        parse_duration("6h"), description="Between two actions on the same node."
    )
    settle_time: Duration = Field(
        parse_duration("30s"),
        description="How long Fleet and the scheduler must have answered, without panic, since the start or a failure;"
        " also how long an action without an effect is waited for.",
    )
    clock_tolerance: Duration = Field(
        parse_duration("2s"), gt=0, description="A larger step of the wall clock is a jump."
    )
    after_clock_jump: Duration = Field(
        parse_duration("10m"), description="No action for this long after a jump."
    )
    protected_nodes: tuple[NodePattern, ...] = Field(
        default=(),
        description="Nodes that are never acted on, by their short or full names, in any case; * and ? match, and a"
        " range such as [01-16] is refused.",
    )
    maintenance: tuple[WindowConfig, ...] = Field(
        default=(), description="When nothing is acted on, because people work on the cluster."
    )
    hours: tuple[WindowConfig, ...] = Field(
        default=(), description="When acting is allowed at all; empty is always."
    )
    stop_file: str = Field(
        "/var/lib/ingero-remediator/stop",
        description="While this file is there nothing is acted on. Any content; `touch` suffices. Where the policy"
        f" names none, {FORMER_STOP_FILE} counts as well, the default of earlier versions.",
    )

    def find_stop_file(self) -> str:
        """The stop file that is there now; empty for none."""
        is_named = "stop_file" in self.model_fields_set
        files = (self.stop_file,) if is_named else (self.stop_file, FORMER_STOP_FILE)
        return next((one for one in files if Path(one).exists()), "")

    def protects(self, name: str) -> bool:
        """Whether a node is never acted on.

        Host names have no case, and the scheduler may know a node by its first label where the list has all of them, or
        the other way round.
        """
        name, patterns = name.lower(), [pattern.lower() for pattern in self.protected_nodes]
        short = name.partition(".")[0]
        if short == name:
            patterns += [pattern.partition(".")[0] for pattern in patterns]
        return any(
            fnmatch.fnmatchcase(one, pattern) for one in (name, short) for pattern in patterns
        )


class SlurmConfig(StrictModel):
    """Drain and resume through ``scontrol``."""

    bin_dir: str = Field("", description="Folder of scontrol and squeue; empty searches PATH.")
    timeout: Duration = Field(parse_duration("10s"), gt=0, description="Of one command.")
    drained_by: Literal["remediator", "health-check"] = Field(
        "remediator",
        description="Who runs `scontrol update`: the remediator, or ingero-health-check on the node itself, which asks"
        " `listen` what to do; settle_time must be longer than HealthCheckInterval then.",
    )
    requeue: bool = Field(
        default=False,
        description="After the drain, requeue the node's jobs that allow it; they lose what was not checkpointed.",
    )
    node_names: dict[str, str] = Field(
        default={},
        description="Fleet's node → Slurm's NodeName, where neither NodeName nor NodeHostName is like it.",
    )


class NvsentinelConfig(StrictModel):
    """Health events for NVSentinel. It cannot be asked whether a node is out of service."""

    socket: str = Field(
        "/var/run/nvsentinel.sock",
        description="Of the platform connector; its folder is mounted from the host.",
    )
    token_file: str = Field(
        "",
        description="Token of a service account that NVSentinel lists in crossNodeServiceAccounts, for other nodes than"
        " this one; read again for each event.",
    )
    strategy: Literal["store-only", "execute"] = Field(
        "store-only",
        description="store-only: NVSentinel keeps the event and changes nothing; execute: its rules decide.",
    )
    recommended_action: Literal[
        "NONE", "COMPONENT_RESET", "CONTACT_SUPPORT", "RUN_FIELDDIAG", "RESTART_VM", "RESTART_BM", "REPLACE_VM",
        "RUN_DCGMEUD",
    ] = Field(
        "CONTACT_SUPPORT",
        description="NONE is not fatal: no condition, only an event of the node.",
    )  # fmt: skip
    component_class: str = Field("Node", description="As the rules of the site compare it.")
    timeout: Duration = Field(parse_duration("10s"), gt=0, description="Of one event.")
    node_names: dict[str, str] = Field(
        default={}, description="Fleet's node → name of the Node, where they differ."
    )


class CommandConfig(StrictModel):
    """Commands of the site's own. They cannot be asked whether a node is out of service."""

    drain: tuple[str, ...] = Field(
        min_length=1,
        description="Program and arguments that take the node of $INGERO_ACTION_NODE_ID out of service.",
    )
    undo: tuple[str, ...] = Field(
        min_length=1, description="Program and arguments that give it back."
    )
    timeout: Duration = Field(parse_duration("30s"), gt=0, description="Of one command.")


class ActuatorConfig(StrictModel):
    """Who takes a node out of service: exactly one section."""

    slurm: SlurmConfig | None = Field(None, description="Slurm: drain with a reason, and resume.")
    kubernetes: KubernetesConfig | None = Field(
        None, description="Kubernetes: a taint, a cordon, a condition."
    )
    kubernetes_device: KubernetesDeviceConfig | None = Field(
        None, description="Kubernetes: a taint of the one device that the rank was given."
    )
    nvsentinel: NvsentinelConfig | None = Field(
        None, description="NVSentinel: a health event about the node."
    )
    command: CommandConfig | None = Field(None, description="Commands of the site's own.")
    webhook: SignedWebhookConfig | None = Field(
        None, description="Requests whose body is signed, as Standard Webhooks has it."
    )

    @property
    def kind(self) -> str:
        """The name of that section, which the journal has of each action."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError(f"give exactly one of {', '.join(type(self).model_fields)}")
        return self


class UndoConfig(StrictModel):
    """When an action is reversed without being asked."""

    when_retracted: bool = Field(
        default=False,
        description="Give a node back when Fleet has judged its ranks and finds them ordinary again. A node without"
        " ranks is not judged, so silence never gives it back.",
    )
    retracted_for: Duration = Field(
        parse_duration("10m"),
        description="How long they must have been ordinary, and at work, without a break.",
    )


class JournalConfig(StrictModel):
    """What was done and why."""

    file: str = Field(
        "/var/lib/ingero-remediator/journal.db",
        description="SQLite. Remediators of one file take turns: one acts, the others wait.",
    )


class AuditConfig(StrictModel):
    """Where the journal's entries are sent, besides."""

    endpoint: Url = Field(description="Echo's OTLP over HTTP, such as https://echo:4318.")
    bearer_file: str = Field("", description="File with the bearer; read again for each request.")
    ca_file: str | None = Field(
        None, description="PEM file of the authorities to trust; empty trusts the system's."
    )
    interval: Duration = Field(
        parse_duration("2s"), gt=0, description="Between two polls of what waits."
    )
    timeout: Duration = Field(parse_duration("10s"), gt=0, description="Of one request.")


class RemediatorConfig(StrictModel):
    """The whole file."""

    mode: Literal["dry-run", "ask", "auto"] = Field(
        "dry-run",
        description="dry-run says what it would do; ask waits for `ingero-remediator approve ID`; auto acts.",
    )
    fleet: FindingSourceConfig = Field(
        FindingSourceConfig(), description="Where findings come from."
    )
    findings: FindingsConfig = Field(
        FindingsConfig(), description="What a finding must be before it is acted on."
    )
    brakes: BrakesConfig = Field(
        BrakesConfig(), description="What holds actions back, however clear the finding is."
    )
    action: ActuatorConfig = Field(
        description="Who takes a node out of service: exactly one section."
    )
    confirm: ConfirmConfig | None = Field(
        None, description="What else must agree, once nothing but it stops an action."
    )
    approval: ApprovalConfig = Field(ApprovalConfig(), description="Mode ask.")
    undo: UndoConfig = Field(
        UndoConfig(), description="When an action is reversed without being asked."
    )
    journal: JournalConfig = Field(JournalConfig(), description="What was done and why.")
    audit: AuditConfig | None = Field(
        None, description="Where each entry of the journal is sent as a log record, besides."
    )
    listen: Endpoint | None = Field(
        None, description="host:port to serve /metrics, /healthz and /readyz on; empty is off."
    )

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.findings.max_age < 2 * self.fleet.poll_interval:
            raise ValueError("findings.max_age must be at least twice fleet.poll_interval")
        return self

    @model_validator(mode="after")
    def _check_slurm(self) -> Self:
        slurm = self.action.slurm
        if self.confirm is not None and self.confirm.pair_test is not None and slurm is None:
            raise ValueError("confirm.pair_test is there for action.slurm only")
        if slurm is not None and slurm.drained_by == "health-check" and self.listen is None:
            raise ValueError("action.slurm.drained_by: health-check needs listen, which nodes ask")
        return self


def load_policy(file: str | Path) -> RemediatorConfig:
    """Read the policy file.

    Raises:
        ConfigError: It cannot be read, or something in it is wrong; every problem is listed with its line.
    """
    return build_policy(load_document(file))


def build_policy(document: Document) -> RemediatorConfig:
    """The same of a document.

    Raises:
        ConfigError: Something in it is wrong.
    """
    config, problems = check_model(RemediatorConfig, document.tree, lines=document.lines)
    document.problems += problems
    document.raise_problems()
    assert config is not None
    return config


def write_defaults() -> str:
    """Every setting with its default and its meaning, as YAML that is valid."""
    head = (
        "# Every setting of ingero-remediator, with its default.\n"
        "# ${env:NAME} and ${env:NAME:-default} are filled in from the environment; durations are 5s, 1m30s.\n"
    )
    return head + "\n".join(write_commented(RemediatorConfig, {"action": {"slurm": {}}}, "")) + "\n"
