"""Every name that crosses a process boundary: metrics, attributes, headers, paths, states.

Spelled once; what belongs to one of Fleet's log records stands in that record's own module (`ingero.wire.verdicts`,
``costs``, ``diagnosis``, ``episodes``, ``hangs``). A name's meaning and its source stand beside it: "agent" is the wire
of the existing agent (v0.17), as its recorded bodies in ``tests/data/wire_samples`` show it; "OTLP" is the
OpenTelemetry protocol specification 1.x; "ours" is new here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

THRESHOLD_PATH: Final = "/api/v1/threshold"
"""Of the threshold page, which agents ask when answers to pushes carry no threshold. Agent: GET fallback."""


class Header(StrEnum):
    """HTTP headers and gRPC metadata keys (gRPC's are lower case by its rules)."""

    THRESHOLD = (
        "X-Ingero-Threshold"  # agent: decimal in [0.1, 0.99]; anything else is rejected there
    )
    QUORUM_MET = "X-Ingero-Quorum-Met"  # agent: "true" or "false"
    GRPC_THRESHOLD = "ingero-threshold"  # agent's contract
    GRPC_QUORUM_MET = "ingero-quorum-met"
    PANIC = "X-Ingero-Panic"  # ours: "true" instead of the two, while nobody is to judge itself
    GRPC_PANIC = "ingero-panic"
    DIAGNOSE = (
        "X-Ingero-Diagnose"  # ours: asks why a worker of the node is slow, docs/specs/diagnosis.md
    )
    GRPC_DIAGNOSE = "ingero-diagnose"
    CLUSTER_HINT = "ingero.cluster.id"  # Fleet's documentation; also legal as a gRPC metadata key


CLUSTER_QUERY: Final = "cluster_id"
"""Query parameter of pushes and of the threshold page. Agent."""


PROVIDER_ALIASES: Final = {"ec2": "aws"}
"""Names of one provider: tables of rates say ec2 where agents say aws."""
MIN_PLAUSIBLE_NS: Final = 1_000_000_000_000_000_000
"""2001-09-09. A time before it counts from the sender's boot, as older agents date collective points."""
MAX_ID_LENGTH: Final = 256
"""Longest id or name that Fleet takes from a sender, in characters."""


class DetectionMode(StrEnum):
    """Value of `Attribute.DETECTION_MODE`: where an agent's threshold comes from. Agent."""

    NONE = "none"
    FLEET = "fleet"
    FLEET_CACHED = "fleet-cached"
    LOCAL_CACHED = "local-cached"
    LOCAL_BASELINE = "local-baseline"


class DominantSignal(StrEnum):
    """Value of `Attribute.DOMINANT_SIGNAL`. Agent."""

    THROUGHPUT = "throughput"
    COMPUTE = "compute"
    MEMORY = "memory"
    CPU = "cpu"
    UNKNOWN = "unknown"


class MemcpyDirection(StrEnum):
    """Value of `Attribute.MEMCPY_DIRECTION`. Agent."""

    H2H = "h2h"
    H2D = "h2d"
    D2H = "d2h"
    D2D = "d2d"
    DEFAULT = "default"
    UNKNOWN = "unknown"


class Scope(StrEnum):
    """Instrumentation scope names."""

    HEALTH = "ingero.health"  # agent: health loop
    COLLECTIVES = "ingero.collectives"  # ours: columnar collective batches


HEALTH_SCOPE_VERSION: Final = "0.10.0"
"""The agent sends this fixed string whatever its own version."""


class Attribute(StrEnum):
    """Attributes of resources, data points, log records and spans."""

    # Resource.
    SERVICE_NAME = "service.name"
    SERVICE_VERSION = "service.version"
    K8S_NODE_NAME = "k8s.node.name"
    NODE_ID = "ingero.node.id"
    CLUSTER_ID = "ingero.cluster.id"
    WORLD_SIZE = "ingero.world_size"  # int; absent when the job is not distributed
    NODE_RANK = "ingero.node.rank"  # int
    PROVIDER = "ingero.provider"  # aws, gcp, azure; absent when not detected
    # Health points.
    NODE_STATE = "ingero.node.state"
    WORKLOAD_TYPE = "ingero.workload_type"
    CGROUP_PATH_HASH = "ingero.cgroup_path_hash"  # the cohort; empty is cluster-wide
    DETECTION_MODE = "ingero.detection_mode"
    DETECTION_MODE_V010 = "mode"  # the same, from agents before v0.13
    GPU_MODEL = "ingero.gpu_model"  # first line of nvidia-smi's names, verbatim
    GPU_COUNT = "ingero.gpu_count"  # int
    MEMCPY_DIRECTION = "ingero.memcpy.direction"
    # Straggler events.
    THRESHOLD = "threshold"
    SCORE = "score"
    DOMINANT_SIGNAL = "dominant_signal"
    EVENT_ID = "ingero.event.id"  # UUIDv4, a new one every tick
    # Per-event collective gauges of older agents.
    NCCL_OP_TYPE = "nccl.op_type"  # "ncclAllReduce" on the wire, "allreduce" in the documents
    NCCL_COMM_ID_HASH = "nccl.comm_id_hash"
    NCCL_RANK = "nccl.rank"
    # Columnar collective batches; ours, docs/specs/collective-batch.md.
    COLLECTIVE_COMM = "ingero.collective.comm"
    COLLECTIVE_COMM_RANK = "ingero.collective.comm_rank"
    COLLECTIVE_N_RANKS = "ingero.collective.n_ranks"
    COLLECTIVE_CLOCK = "ingero.collective.clock"
    COLLECTIVE_COUNT = "ingero.collective.count"
    RANK_LIMIT_USE = "ingero.rank.cpu_limit_utilization"
    COLLECTIVE_LATE_NS = (
        "ingero.collective.late_ns"  # how long it waited for Fleet on its agent's disk
    )
    # Where a rank stopped; ours, docs/specs/collective-standing.md.
    PROGRESS_ENTERED = "ingero.collective.entered"
    PROGRESS_LEFT = "ingero.collective.left"
    PROGRESS_OP = "ingero.collective.op"
    PROGRESS_STILL_NS = "ingero.collective.still_ns"
    PROGRESS_GONE = "ingero.collective.gone"
    PROGRESS_GONE_NS = "ingero.collective.gone_ns"  # how long ago its process ended
    PROGRESS_EXIT_SIGNAL = "ingero.collective.exit_signal"
    PROGRESS_EXIT_STATUS = "ingero.collective.exit_status"
    PROGRESS_STOPPED = "ingero.collective.stopped"
    RANK = "ingero.rank"  # global rank of the reporting process
    RANK_GPUS = "ingero.rank.gpus"  # GPUs that wait when this rank waits
    RANK_JOB = "ingero.rank.job"  # tells jobs on one node apart
    RANK_LABELS = "ingero.rank.labels"  # key-value list: the launcher's coordinates


class MetricName(StrEnum):
    """Metric names of pushes."""

    # Health loop, one push per interval. Agent.
    HEALTH_SCORE = "ingero.node.health_score"
    THROUGHPUT_RATIO = "ingero.node.throughput_ratio"
    COMPUTE_EFFICIENCY = "ingero.node.compute_efficiency"
    MEMORY_HEADROOM = "ingero.node.memory_headroom"
    CPU_AVAILABILITY = "ingero.node.cpu_availability"
    DEGRADATION_WARNING = "ingero.node.degradation_warning"
    AGENT_DETECTION_MODE = "ingero.agent.detection_mode"
    AGENT_FLEET_REACHABLE = "ingero.agent.fleet_reachable"
    NODE_INFO = "ingero.node.info"
    NODE_WORLD_SIZE = "ingero.node.world_size"
    STRAGGLER_EVENT = "ingero.node.straggler_event"
    # Per-event collectives of older agents.
    COLLECTIVE_DURATION_MS = "nccl.collective.duration_ms"
    COLLECTIVE_PEER_LAG_MS = "nccl.collective.peer_lag_ms"  # computed by Fleet


class FleetMetric(StrEnum):
    """Series that Fleet itself emits, labelled ``cluster_id`` and ``cgroup_path_hash``."""

    THRESHOLD = "ingero_fleet_threshold"
    ACTIVE_NODES = "ingero_fleet_active_nodes"
    IDLE_NODES = "ingero_fleet_idle_nodes"
    COVERAGE_LOW = "ingero_fleet_coverage_low"
    PANIC_MODE = "ingero_fleet_panic_mode"
    MEDIAN = "ingero_fleet_median"
    MAD = "ingero_fleet_mad"
    STRAGGLER_COUNT = "ingero_fleet_straggler_count"


class UdsType(StrEnum):
    """Value of ``type`` in a remediation message."""

    MEMORY = "memory"
    STRAGGLE = "straggle"
    STRAGGLER_STATE = "straggler_state"
    STRAGGLER_RESOLVED = "straggler_resolved"
    INFERENCE_OUTLIER = "inference_outlier"
    INFERENCE_SAMPLER_DEGRADED = "inference_sampler_degraded"


COLLECTIVE_EVENT: Final = "ingero.collective.batch"
"""Event name of a log record that carries a columnar collective batch."""

PROGRESS_EVENT: Final = "ingero.collective.standing"
"""Event name of a log record that says where a rank stopped moving."""

DEFAULT_REMEDIATE_SOCKET: Final = "/tmp/ingero-remediate.sock"  # noqa: S108 - the path consumers already dial
DEFAULT_REMEDIATE_GID: Final = 65532
