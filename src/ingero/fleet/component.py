"""What a component is: the protocol between the service and everything it wires together.

At the bottom of the collector; imports no other part of it. A component is created by its factory
(`ingero.fleet.factory`) from a validated config, started with a `Host`, and stopped. No component imports another: what
one offers to the others it registers with the host as a typed capability (`PushAnswerer`, `Authenticator`,
`AdminRoutes`), and who needs one asks for it.

Lifecycle. Start order is extensions, exporters, processors, receivers; stop order is the reverse, so data that was
accepted still finds its consumer. ``start`` may raise; ``stop`` drains within the host's deadline and does not.

Threads. ``start``, ``stop`` and timers run on the service's event loop. ``consume`` may run on any thread, because
the gRPC receiver has its own: the graph serialises calls into one pipeline, so a processor sees one batch at a time,
but what its own timers share with ``consume`` it must lock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol, TypeVar, runtime_checkable

from typing_extensions import override

from ingero.config import Endpoint
from ingero.otlp.codec import Export
from ingero.telemetry.clock import Clock
from ingero.telemetry.metrics import MeterRegistry

_ID: Final = re.compile(r"(?P<type>[a-zA-Z][0-9a-zA-Z_]{0,62})(?:/(?P<name>[^\s/]{1,1024}))?")

CapabilityT = TypeVar("CapabilityT")
SharedT = TypeVar("SharedT")


@dataclass(frozen=True, slots=True)
class NamesExtension:
    """Marks a setting that names an extension: ``Annotated[str, NamesExtension()]``. What it names must run."""


class ComponentKind(StrEnum):
    """The four kinds; the value is the section's name in the configuration."""

    RECEIVER = "receivers"
    PROCESSOR = "processors"
    EXPORTER = "exporters"
    EXTENSION = "extensions"


@dataclass(frozen=True, slots=True)
class ComponentId:
    """``type`` or ``type/name``, as the Collector writes it."""

    type: str
    name: str = ""

    @override
    def __str__(self) -> str:
        return f"{self.type}/{self.name}" if self.name else self.type


def parse_id(text: str) -> ComponentId | None:
    """Read ``type`` or ``type/name``; None when it is neither."""
    match = _ID.fullmatch(text)
    return None if match is None else ComponentId(match["type"], match["name"] or "")


class Component(Protocol):
    """Something with a lifecycle."""

    async def start(self, host: Host) -> None:
        """Open what it needs. Raises an `ingero.errors.IngeroError` that stops the service's start."""
        ...

    async def stop(self) -> None:
        """Stop accepting, drain, release. Runs also when ``start`` of a later component failed."""
        ...


class Stability(StrEnum):
    """How far a component may be relied on; the Collector's words."""

    ALPHA = "alpha"
    BETA = "beta"
    STABLE = "stable"


class Host(Protocol):
    """What the running service offers a component."""

    @property
    def clock(self) -> Clock:
        """Time; components never read it elsewhere."""
        ...

    @property
    def meter(self) -> MeterRegistry:
        """The service's own telemetry (port 8888)."""
        ...

    @property
    def draining(self) -> bool:
        """True from the moment the service begins to end: receivers answer 503, and no other exporter takes over."""
        ...

    def offer(self, capability: type[CapabilityT], provider: CapabilityT) -> None:
        """Make a capability available to every component that starts later."""
        ...

    def find(
        self, capability: type[CapabilityT], component: ComponentId | None = None
    ) -> Sequence[CapabilityT]:
        """Every provider of a capability, or the one that the named component offered; may be empty."""
        ...

    def shared(self, key: tuple[str, str], build: Callable[[], SharedT]) -> SharedT:
        """State that instances of one component in several pipelines share, built on first use.

        Args:
            key: The component's id as text, and the name of the state. The state outlives a reload that did not
                change the settings of that component. One of no component, whose key begins with the absolute path of a
                file or folder or with nothing, outlives every reload.
            build: Makes it.
        """
        ...

    def announce(self, bound: Endpoint, what: str = "") -> None:
        """Note what the component that is starting listens on, with the port that was bound.

        Args:
            bound: Where.
            what: Which of several, such as ``grpc``.
        """
        ...

    def every(self, interval_ns: int, action: Callable[[], None]) -> None:
        """Call ``action`` on the event loop at this interval until the component that asked is stopped.

        Its errors are logged, not fatal.
        """
        ...


@dataclass(slots=True)
class PushContext:
    """What is known about the push that is being answered.

    The receiver fills the hints, a processor that understands the body fills the identity, the answerer reads both.

    Attributes:
        cluster_hint: From ``?cluster_id=`` or the ``ingero.cluster.id`` header or metadata; a hint, never the truth.
        cluster_id: From the body's resource; None until a processor has read it.
        node_id: Likewise.
        cohort: ``ingero.cgroup_path_hash`` of the pushing node; empty is the cluster-wide bucket.
        auth_subject: Who the bearer or the client certificate says is pushing; empty without authentication.
        allowed_clusters: Clusters that the pusher may report for; None is any.
        n_rejected: Points, records or spans that a processor dropped as bad; the answer says so
            (OTLP's ``partialSuccess``). A processor adds to it.
        rejected_why: The reason in the answer.
        only_cluster: Of the body only this cluster's resources count; None is all.
        is_replay: Processors learn from it, and nothing of it leaves: another Fleet has passed it on.
    """

    cluster_hint: str = ""
    cluster_id: str | None = None
    node_id: str | None = None
    cohort: str = ""
    auth_subject: str = ""
    allowed_clusters: frozenset[str] | None = None
    n_rejected: int = 0
    rejected_why: str = ""
    only_cluster: str | None = None
    is_replay: bool = False


@dataclass(frozen=True, slots=True)
class PushAnswer:
    """The threshold that rides an answer; both values exist or there is no answer at all, except for `WITHHELD`."""

    threshold: float
    quorum_met: bool


WITHHELD: Final = PushAnswer(0.0, quorum_met=False)
"""There is a threshold, and no node is to compare with it now: most of the cluster fell together. Sent as a header of
its own instead of the two, and on the threshold page as 0 with ``false``, which every agent takes for "none"."""


class PushAnswerer(Protocol):
    """Capability: knows the threshold for a pusher."""

    def answer(self, push: PushContext) -> PushAnswer | None:
        """The current threshold for this push's cohort or cluster, or None when there is none. Never blocks."""
        ...


class QuestionSource(Protocol):
    """Capability of a component that wants to know something of a node."""

    def find_question(self, cluster_id: str, node_id: str) -> str | None:
        """What to ask the agent of a node in the answer to its push: plain ASCII; None for nothing. Any thread."""
        ...


class ThresholdSource(Protocol):
    """Capability of a component that computes thresholds; the extension that answers asks every source in turn."""

    def find_answer(
        self, cluster_id: str, cohort_hash: str = "", node_id: str | None = None
    ) -> PushAnswer | None:
        """The threshold for a node, else its cohort, else its cluster; None when there is none. Any thread."""
        ...


class Hardware(NamedTuple):
    """What a node computes with; empty where it is not known.

    Attributes:
        provider: ``ingero.provider``.
        gpu_model: ``ingero.gpu_model``.
    """

    provider: str
    gpu_model: str


class HardwareSource(Protocol):
    """Capability of a component that knows what nodes are made of."""

    def find_hardware(self, cluster_id: str, node_id: str) -> Hardware | None:
        """What the node says it is; None for an unknown node. Any thread."""
        ...


class Learner(Protocol):
    """Capability of a component that judges clusters: it can take over one that another Fleet judged. On the loop."""

    def begin_replay(self, cluster_id: str, reported: Mapping[str, str]) -> None:
        """Forget the cluster, and report nothing of it: its pushes come once more.

        Args:
            cluster_id: The cluster.
            reported: What was reported of it so far, as for `end_replay`, which may know of more.
        """
        ...

    def note_stored(self, cluster_id: str, stored_wall_ns: int, now_ns: int) -> None:
        """The cluster's next push, which arrived at ``now_ns``, was stored then: alike for all who read it."""
        ...

    def is_behind(self, cluster_id: str) -> bool:
        """Whether so much of the cluster waits to be judged that its next push should wait too."""
        ...

    def end_replay(self, cluster_id: str, reported: Mapping[str, str]) -> None:
        """Go on from what was reported of the cluster: what each report said last, by what it is about."""
        ...


class ReportSender(Protocol):
    """Capability of a component whose reports go through a `ReportLedger`."""

    @property
    def name(self) -> str:
        """The component's id, the same in every Fleet."""
        ...

    def try_send(self, export: Export | None) -> bool:
        """Send log records; False where they are not taken now and are to be sent again. On the event loop."""
        ...


class ReportLedger(Protocol):
    """Capability where Fleets judge by turns: what was reported is written down where the next judge reads it."""

    def report(
        self,
        cluster_id: str,
        reported: Mapping[str, str | None],
        sender: ReportSender,
        export: Export | None,
    ) -> None:
        """Write down what a report says, then send it; not at all when another Fleet judges the cluster. Any thread.

        Args:
            cluster_id: The cluster.
            reported: By what it is about; None where there is nothing to remember any more.
            sender: Sends it, and in another Fleet the sender of the same name.
            export: The report; None where there is nothing to send.
        """
        ...


class Authenticator(Protocol):
    """Capability of ``bearertokenauth`` and its kin, on both sides of a connection."""

    def authenticate(self, authorization: str | None) -> str | None:
        """The subject behind an ``Authorization`` value, or None when it is refused. Constant time.

        Raises:
            RetryableError: It cannot be checked now; the same request may be sent again.
        """
        ...

    def client_headers(self) -> Mapping[str, str]:
        """Headers an exporter adds to each request."""
        ...


@runtime_checkable
class ClusterBound(Protocol):
    """What an `Authenticator` also is when its subjects may report for some clusters only."""

    def find_clusters(self, subject: str) -> frozenset[str] | None:
        """The clusters that a subject may report for; None is any."""
        ...


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """One read-only page of JSON on the admin endpoint.

    Attributes:
        path: Below the admin root, such as ``/api/v1/admin/clusters``.
        description: One line for the index.
        read: Query parameters → a JSON-able answer. Raises BadDataError (400) or KeyError (404).
    """

    path: str
    description: str
    read: Callable[[Mapping[str, str]], Any] = field(repr=False)


class AdminRoutes(Protocol):
    """Capability: pages a component wants on the admin endpoint."""

    def admin_routes(self) -> Sequence[AdminRoute]:
        """The pages, fixed at start."""
        ...


UNKNOWN_LEVEL: Final = 255
"""A level that is not known; those that are go up to 250."""
TOP_LEVEL: Final = 250


@dataclass(frozen=True, slots=True)
class RankMeasure:
    """What is known of each rank as one number, for the heat map of the live page.

    Attributes:
        name: In addresses.
        title: For people.
        best: The value of level 0.
        worst: The value of level 250 and of all that is beyond.
        rows: What a row is: ``nodes`` or ``ranks``.
    """

    name: str
    title: str
    best: float
    worst: float
    rows: str


class RankColumn(NamedTuple):
    """A measure of every rank of a cluster at one moment.

    Attributes:
        names: Of the rows, each once.
        levels: As many bytes: 0 is `RankMeasure.best`, 250 is `RankMeasure.worst`, 255 is unknown.
    """

    names: Sequence[str]
    levels: bytes


class RankLevels(Protocol):
    """Capability of a component that measures ranks."""

    @property
    def measure(self) -> RankMeasure:
        """What it measures."""
        ...

    def read_levels(self) -> Mapping[str, RankColumn]:
        """Every cluster's ranks as of now. Any thread."""
        ...


class BatchStore(Protocol):
    """Bytes of batches that outlive the process, of one owner, in the order in which they were written."""

    def list_keys(self) -> Sequence[int]:
        """Those that an earlier process left, oldest first."""
        ...

    def write(self, stored: bytes) -> int:
        """Store one; its key. Raises RetryableError when there is no room for it."""
        ...

    def read(self, key: int) -> bytes:
        """What was written. Raises BadDataError when it is damaged, RetryableError when it cannot be read for now."""
        ...

    def remove(self, key: int) -> None:
        """Forget one."""
        ...

    def set_aside(self, key: int, reason: str) -> None:
        """Count one that cannot be used as damaged, and keep it out of the way."""
        ...


class BatchStorage(Protocol):
    """Capability of ``file_storage`` and its kin."""

    def find_place(self, owner: str) -> str:
        """Where the store of one component is: the same over reloads, whatever the settings, while its batches are."""
        ...

    def open_store(self, owner: str) -> BatchStore:
        """The store of one component, such as ``exporters.otlp``. Raises IngeroError when it cannot be used."""
        ...


class OfferedCapabilities:
    """What the components of a host offered each other, in their order."""

    def __init__(self) -> None:
        self._offers: list[tuple[type, ComponentId | None, Any]] = []

    def add(
        self, capability: type[CapabilityT], component: ComponentId | None, provider: CapabilityT
    ) -> None:
        """Note what a component offers; None for the host itself."""
        self._offers.append((capability, component, provider))

    def find(
        self, capability: type[CapabilityT], component: ComponentId | None = None
    ) -> Sequence[CapabilityT]:
        """Providers in the order in which they offered; of one component, or of all."""
        return [
            provider
            for offered, by, provider in self._offers
            if offered is capability and component in {None, by}
        ]
