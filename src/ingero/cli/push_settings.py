"""The options of an agent that pushes to a Fleet, checked all at once, as its settings."""

from __future__ import annotations

import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import Final

from ingero.agent.health.loop_settings import LoopSettings
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.service import AgentSettings
from ingero.agent.health.signals.baseline import BaselineSettings
from ingero.agent.health.signals.classify import ClassifierSettings
from ingero.agent.health.signals.machine import MachineSettings
from ingero.agent.health.signals.node_facts import GpuFacts, find_own_cohort
from ingero.agent.health.spill import SpillSettings
from ingero.agent.health.threshold_choice import ModeSettings, fresh_max_age
from ingero.agent.health.transport import TransportSettings
from ingero.cli.live import PushConfig, RemediateConfig, SpansConfig
from ingero.config.environment import allows_loose_keys
from ingero.errors import ConfigError, ConfigProblem
from ingero.header_values import clean_header_value, is_header_name
from ingero.otlp.client.endpoint import OtlpEndpoint, parse_endpoint
from ingero.units import NS_PER_MS, NS_PER_S


def check_tls_files(
    files: tuple[str, str, str], *, is_insecure: bool, allows_loose_key: bool
) -> list[ConfigProblem]:
    """Say what is wrong with ``--fleet-tls-ca``, ``-cert`` and ``-key``.

    None is needed: without an authority those of the system are trusted, without a pair no certificate is shown.

    Args:
        files: CA, certificate and key as given; empty when not given.
        is_insecure: TLS was switched off.
        allows_loose_key: Accept a key that others may read.
    """
    options = ("--fleet-tls-ca", "--fleet-tls-cert", "--fleet-tls-key")
    _, certificate, key = files
    problems = []
    if bool(certificate) != bool(key):
        missing, other = reversed(options[1:]) if certificate else options[1:]
        problems.append(ConfigProblem(missing, f"is missing: it goes with {other}"))
    if is_insecure and any(files):
        given = " and ".join(option for option, file in zip(options, files, strict=True) if file)
        problems.append(ConfigProblem("--fleet-insecure", f"contradicts {given}"))
    for option, file in zip(options, files, strict=True):
        if file:
            problem = _check_file(file, is_key=option == options[2] and not allows_loose_key)
            problems += [ConfigProblem(option, problem)] if problem else []
    return problems


def _check_file(file: str, *, is_key: bool) -> str:
    try:
        mode = Path(file).stat().st_mode
    except OSError as error:
        return f"{file}: {error.strerror or error}"
    if not stat.S_ISREG(mode):
        return f"{file} is not a file"
    if is_key and mode & 0o077:
        return (
            f"{file} can be read by others (mode {stat.S_IMODE(mode):04o}): chmod 0600 it, or set "
            "INGERO_TLS_ALLOW_LOOSE_KEY_PERMS=1"
        )
    return ""


MIN_PUSH_INTERVAL_NS: Final = NS_PER_S
MIN_TIMEOUT_NS: Final = 100 * NS_PER_MS
USUAL_TIMEOUT_NS: Final = 5 * NS_PER_S
MIN_SAMPLE_INTERVAL_NS: Final = 100 * NS_PER_MS
MAX_WORLD_SIZE: Final = 2**31 - 1
WINDOW_SKEW_NS: Final = 5 * NS_PER_S
"""What two nodes' windows may differ by: recorders count launches in buckets of 5 s."""


def build_settings(
    push: PushConfig, remediate: RemediateConfig, gpus: GpuFacts, spans: SpansConfig | None = None
) -> AgentSettings:
    """Check every option and build the agent's settings.

    Raises:
        ConfigError: Lists every problem by the option's name.
    """
    return _Builder(push, remediate, spans or SpansConfig()).build(gpus)


class _Builder:
    """Collects problems while it builds."""

    def __init__(self, push: PushConfig, remediate: RemediateConfig, spans: SpansConfig) -> None:
        self._options = push
        self._remediate = remediate
        self._spans = spans
        self._problems: list[ConfigProblem] = []

    def build(self, gpus: GpuFacts) -> AgentSettings:
        options = self._options
        self._check_names()
        self._check_times()
        files = (options.fleet_tls_ca, options.fleet_tls_cert, options.fleet_tls_key)
        self._problems += check_tls_files(
            files, is_insecure=options.fleet_insecure, allows_loose_key=allows_loose_keys()
        )
        headers = self._parse_headers()
        pushes = self._parse_endpoints("--fleet-endpoint", options.fleet_endpoint)
        poll = self._parse_endpoint("--fleet-threshold-url", options.fleet_threshold_url)
        spans = self._parse_endpoint("--otlp-endpoint", self._spans.otlp_endpoint)
        if not options.fleet_endpoint.strip(" ,"):
            self._add_problem("--fleet-endpoint", "is required")
        if self._spans.otlp_enabled and not self._spans.otlp_endpoint:
            self._add_problem("--otlp-endpoint", "is required with --otlp-enabled")
        if self._problems or not pushes:
            raise ConfigError(self._problems)
        return AgentSettings(
            identity=self._build_identity(gpus),
            transport=replace(self._build_transport(pushes[0], headers), others=tuple(pushes[1:])),
            is_grpc=options.fleet_protocol == "grpc",
            loop=self._build_loop(),
            poll=None if poll is None else self._build_transport(poll, headers),
            poll_interval_ns=options.fleet_poll_interval,
            persist_path=options.fleet_persist_path,
            persist_stale_age_ns=options.fleet_persist_stale_age,
            socket_path=self._remediate.remediate_socket if self._remediate.remediate else None,
            socket_gid=self._remediate.remediate_gid,
            spans=TransportSettings(endpoint=spans, timeout_ns=self._timeout_ns, is_protobuf=True)
            if spans is not None and self._spans.otlp_enabled
            else None,
            spill=self._build_spill(),
        )

    def _add_problem(self, option: str, message: str) -> None:
        self._problems.append(ConfigProblem(option, message))

    def _check_names(self) -> None:
        options = self._options
        names = {
            "--fleet-cluster-id": options.fleet_cluster_id,
            "--fleet-node-id": options.fleet_node_id or socket.gethostname(),
            "--fleet-workload-type": options.fleet_workload_type,
        }
        for option, name in names.items():
            if "\r" in name or "\n" in name:
                self._add_problem(option, "must not contain a line break")
            if not _is_text(name):
                self._add_problem(option, "is not UTF-8 text")
            if option != "--fleet-workload-type" and not name.strip():
                self._add_problem(option, "must not be blank")

    def _check_times(self) -> None:
        options = self._options
        rules = (
            ("--fleet-push-interval", options.fleet_push_interval >= MIN_PUSH_INTERVAL_NS,
             "must be at least 1s"),
            ("--fleet-timeout", self._timeout_ns >= MIN_TIMEOUT_NS or options.fleet_timeout is None,
             "must be at least 100ms"),
            ("--fleet-timeout", self._timeout_ns <= options.fleet_push_interval,
             "must not be longer than --fleet-push-interval"),
            ("--fleet-poll-interval", options.fleet_poll_interval >= NS_PER_S,
             "must be at least 1s"),
            ("--fleet-persist-stale-age", options.fleet_persist_stale_age > 0,
             "must be above 0"),
            ("--sample-interval", options.sample_interval >= MIN_SAMPLE_INTERVAL_NS,
             "must be at least 100ms"),
            ("--fleet-classifier-hysteresis", 0 <= options.fleet_classifier_hysteresis < 0.5,
             "must be at least 0 and below 0.5"),
            ("--fleet-classifier-confirm", options.fleet_classifier_confirm >= 1,
             "must be at least 1"),
            ("--fleet-early-push-delta", 0 < options.fleet_early_push_delta <= 1,
             "must be above 0 and at most 1"),
            ("--fleet-spill-age", options.fleet_spill_age > 0, "must be above 0"),
            ("--fleet-world-size", options.fleet_world_size >= 0, "must not be negative"),
            ("--fleet-world-size", options.fleet_world_size <= MAX_WORLD_SIZE,
             f"must be at most {MAX_WORLD_SIZE}"),
            ("--fleet-node-rank", options.fleet_node_rank >= 0, "must not be negative"),
            ("--fleet-node-rank",
             options.fleet_node_rank < options.fleet_world_size or not options.fleet_node_rank,
             "must be below --fleet-world-size"),
            ("--warmup-samples", options.warmup_samples >= 0, "must not be negative"),
        )  # fmt: skip
        for option, holds, message in rules:
            if not holds:
                self._add_problem(option, message)

    def _parse_headers(self) -> dict[str, str]:
        headers = {}
        for number, text in enumerate(self._options.fleet_header, 1):
            name, equals, value = text.partition("=")
            try:
                cleaned = clean_header_value(value)
            except ValueError as error:
                self._add_problem("--fleet-header", f"header {number}: the value {error}")
                continue
            if not equals or not is_header_name(name.strip()):
                self._add_problem(
                    "--fleet-header", f"header {number}: write NAME=VALUE in plain text"
                )
                continue
            headers[name.strip()] = cleaned
        return headers

    def _parse_endpoints(self, option: str, text: str) -> list[OtlpEndpoint]:
        """Of several Fleets that act as one, with commas between."""
        found = [self._parse_endpoint(option, one) for one in text.split(",")]
        return [one for one in found if one is not None]

    def _parse_endpoint(self, option: str, text: str) -> OtlpEndpoint | None:
        if not text.strip():
            return None
        options = self._options
        is_insecure = (
            self._spans.otlp_insecure if option.startswith("--otlp") else options.fleet_insecure
        )
        try:
            return parse_endpoint(text, is_insecure=is_insecure, option=option)
        except ConfigError as error:
            self._problems += error.problems
            return None

    @property
    def _timeout_ns(self) -> int:
        given = self._options.fleet_timeout
        usual = min(USUAL_TIMEOUT_NS, self._options.fleet_push_interval)
        return usual if given is None else given

    @property
    def _peers_wait_ns(self) -> int:
        given = self._options.fleet_peers_wait
        interval_ns = self._options.fleet_push_interval
        usual = max(interval_ns, min(2 * interval_ns, WINDOW_SKEW_NS))
        return usual if given is None else given

    def _build_spill(self) -> SpillSettings | None:
        options = self._options
        if not options.fleet_spill_size:
            return None
        return SpillSettings(
            options.fleet_spill_dir, options.fleet_spill_size, options.fleet_spill_age
        )

    def _build_loop(self) -> LoopSettings:
        options = self._options
        return LoopSettings(
            push_interval_ns=options.fleet_push_interval,
            sample_interval_ns=min(options.sample_interval, options.fleet_push_interval),
            early_push_delta=options.fleet_early_push_delta,
            peers_wait_ns=self._peers_wait_ns,
            machine=MachineSettings(warmup=options.warmup_samples),
            baseline=BaselineSettings(warmup=options.warmup_samples),
            classifier=ClassifierSettings(
                options.fleet_classifier_hysteresis, options.fleet_classifier_confirm
            ),
            mode=ModeSettings(fresh_max_age_ns=fresh_max_age(options.fleet_push_interval)),
        )

    def _build_identity(self, gpus: GpuFacts) -> NodeIdentity:
        options = self._options
        return NodeIdentity(
            cluster_id=options.fleet_cluster_id,
            node_id=options.fleet_node_id or socket.gethostname(),
            workload_type=options.fleet_workload_type,
            world_size=options.fleet_world_size,
            rank=options.fleet_node_rank,
            provider=options.fleet_provider,
            gpu_model=gpus.model,
            n_gpus=gpus.n_gpus,
            cohort=find_own_cohort(),
        )

    def _build_transport(
        self, endpoint: OtlpEndpoint, headers: dict[str, str]
    ) -> TransportSettings:
        options = self._options
        return TransportSettings(
            endpoint=endpoint,
            timeout_ns=self._timeout_ns,
            cluster_id=options.fleet_cluster_id,
            is_protobuf=options.fleet_protocol == "http/protobuf",
            is_gzip=options.fleet_compression == "gzip",
            headers=headers,
            token_file=options.fleet_bearer_token_file,
            ca_file=options.fleet_tls_ca or None,
            cert_file=options.fleet_tls_cert or None,
            key_file=options.fleet_tls_key or None,
        )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
