"""The devices of processes in pods: each is asked of the kubelet once it is met, on a thread of its own.

One question serves all processes that wait, and each process is answered by a question that was asked after it was met,
so that a pod that took the name of another one does not get its devices. A failure is no answer: it is reported, and
asked again as long as the process lives.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.identity import Assignment, Pod, ProcessIdentity
from ingero.agent.capture.discover.pod_resources import (
    CONTAINER_LOGS,
    ContainerDevices,
    find_container_name,
    list_containers,
)
from ingero.agent.capture.discover.processes import has_ended
from ingero.errors import UnsupportedError

PAUSE_S: Final = 0.2
"""Between two questions: a job's ranks start together, and one answer serves all."""
RETRIES_S: Final = (1.0, 2.0, 5.0, 15.0, 30.0)
_MAX_NOTES: Final = 64
_MAX_NAMED: Final = 1024


class AssignmentFinder:
    """Asks the kubelet.

    Args:
        socket: The kubelet's.
        on_found: Called with the fuller identity of a process, on the asking thread.
        logs: Folder with the logs of the node's containers.
        retries_s: Pauses after failures; the last one repeats.
    """

    def __init__(
        self,
        socket: Path,
        on_found: Callable[[ProcessIdentity], None],
        logs: Path = CONTAINER_LOGS,
        retries_s: tuple[float, ...] = RETRIES_S,
    ) -> None:
        self._socket, self._logs, self._retries_s = socket, logs, retries_s
        self._on_found = on_found
        self._waiting: deque[ProcessIdentity] = deque()
        self._notes: deque[str] = deque(maxlen=_MAX_NOTES)
        self._named: set[str] = set()
        self._attempt = 0
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingero-kubelet", daemon=True)
        self._thread.start()

    def ask(self, identity: ProcessIdentity) -> None:
        """Find the devices of a process in a pod; returns at once. Any thread."""
        self._waiting.append(identity)
        self._wake.set()

    def pop_notes(self) -> Iterator[str]:
        """Sentences about what could not be found, since the last time."""
        while self._notes:
            yield self._notes.popleft()

    def close(self) -> None:
        """Stop; waits for a question that was asked, some seconds at most. Safe to call twice."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while self._wake.wait() and not self._stop.wait(PAUSE_S):
            self._wake.clear()
            asking = [self._waiting.popleft() for _ in range(len(self._waiting))]
            try:
                containers = list_containers(self._socket)
            except UnsupportedError as error:
                self._put_back(asking, error)
                continue
            if self._attempt:
                self._notes.append(f"the kubelet answers again: {self._socket}")
            self._attempt = 0
            for identity in asking:
                self._settle(identity, containers)

    def _put_back(self, asking: Iterable[ProcessIdentity], error: UnsupportedError) -> None:
        """After a failure: the same again, after a while."""
        if not self._attempt:
            hint = f" ({error.hint})" if error.hint else ""
            self._notes.append(
                f"without devices of pods until the kubelet answers: {error.message}{hint}"
            )
        alive = [one for one in asking if not has_ended(one.pid)]
        if self._stop.wait(self._retries_s[min(self._attempt, len(self._retries_s) - 1)]):
            return
        self._attempt += 1
        self._waiting.extend(alive)
        if self._waiting:
            self._wake.set()

    def _settle(self, identity: ProcessIdentity, containers: Iterable[ContainerDevices]) -> None:
        """There is an answer."""
        named = find_container_name(identity.container, self._logs)
        pod = identity.pod
        if named is not None:
            pod = Pod(pod.uid, named.pod, named.namespace)
        mine = [one for one in containers if (one.namespace, one.pod) == (pod.namespace, pod.name)]
        where = f"pod {pod.namespace or '?'}/{pod.name or pod.uid}"
        if not mine:
            self._log_once(
                f"without devices of {where}: the kubelet has no pod of that name; give it POD_NAME and POD_NAMESPACE"
                f" by the downward API, or mount {self._logs}"
            )
            return
        found = _choose(mine, named.container if named is not None else "")
        if found is None:
            self._log_once(
                f"without devices of {where}: several of its containers have some, and which one a process is in"
                f" only {self._logs} would say"
            )
            return
        found = replace(found, gpus=identity.assignment.gpus)
        self._on_found(replace(identity, pod=pod, assignment=found))

    def _log_once(self, text: str) -> None:
        """About a pod, not about each of its processes."""
        if text not in self._named and len(self._named) < _MAX_NAMED:
            self._named.add(text)
            self._notes.append(text)


def _choose(mine: list[ContainerDevices], container: str) -> Assignment | None:
    """The container of that name; without one the only container, or the only one with devices."""
    if container:
        one = next((one for one in mine if one.container == container), None)
        return Assignment(container, one.devices if one is not None else ())
    with_devices = [one for one in mine if one.devices]
    if len(mine) == 1 or len(with_devices) == 1:
        (one,) = with_devices or mine
        return Assignment(one.container, one.devices)
    return None if with_devices else Assignment()
