"""Steps that take too long as messages on the node's local socket, under the existing agent's type."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ingero.agent.events.socket import LocalEventServer, open_listener
from ingero.agent.inference.watch import StepOutlier
from ingero.wire.uds import InferenceOutlier, format_timestamp

_JOIN_S: Final = 2.0
_UINT64: Final = (1 << 64) - 1


class OutlierMessages:
    """Publishes outliers to local readers, once there is a socket.

    Args:
        node_id: This node.
        cluster_id: Its cluster; may be empty.

    Attributes:
        stream: The socket; None publishes nothing.
    """

    def __init__(self, node_id: str, cluster_id: str) -> None:
        self.stream: LocalEventServer | None = None
        self._node_id = node_id
        self._cluster_id = cluster_id

    def publish(self, outlier: StepOutlier) -> None:
        """Hand an outlier to every reader; never blocks."""
        if self.stream is not None:
            self.stream.publish(self.build(outlier))

    def build(self, outlier: StepOutlier) -> InferenceOutlier:
        """The message of an outlier; its id is the same whenever the same step is reported."""
        where = f"{self._node_id}/{outlier.pid}/{outlier.stream}/{outlier.start_ns}"
        return InferenceOutlier(
            node_id=self._node_id,
            cluster_id=self._cluster_id,
            timestamp=format_timestamp(outlier.start_ns),
            pid=outlier.pid,
            step_duration_ns=outlier.duration_ns,
            baseline_p95_ns=outlier.p95_ns,
            bucket=outlier.bucket,
            event_id=str(uuid.uuid5(uuid.NAMESPACE_OID, where)),
            cgroup_path_hash=outlier.cgroup_path_hash,
            stream_handle=outlier.stream & _UINT64,
            phase=outlier.phase,
            baseline_mean_ns=outlier.mean_ns,
            kv_cache_top_alloc_ages_ms=list(outlier.ages_ms),
            rank=outlier.rank,
            world_size=outlier.world_size,
        )


@contextlib.contextmanager
def open_outlier_socket(path: Path, gid: int) -> Iterator[tuple[LocalEventServer, str]]:
    """Serve local readers where no health loop does.

    Yields:
        The server, and a warning for the log (empty when all went well).

    Raises:
        ConfigError: The path is taken or is no socket.
        IngeroError: The system refused the socket.
    """
    with open_listener(path, gid) as (listener, warning):
        server = LocalEventServer(listener)
        thread = threading.Thread(target=server.run, name="ingero-outliers", daemon=True)
        thread.start()
        try:
            yield server, warning
        finally:
            server.close()
            thread.join(_JOIN_S)
