"""Where the kubelet answers which devices it gave to which container: one setting for every command that asks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

KUBELET_SOCKET: Final = "INGERO_KUBELET_SOCKET"
"""Names the socket; the option ``--kubelet-socket`` sets it for its command and for what that starts."""
DEFAULT_KUBELET_SOCKET: Final = "/var/lib/kubelet/pod-resources/kubelet.sock"
"""Source: Kubernetes, "Device Plugins", "Monitoring device plugin resources"."""


def read_kubelet_socket(environ: Mapping[str, str] | None = None) -> Path:
    """``$INGERO_KUBELET_SOCKET``; where the kubelet itself puts it when that is not set."""
    values = os.environ if environ is None else environ
    return Path(values.get(KUBELET_SOCKET) or DEFAULT_KUBELET_SOCKET)


def set_kubelet_socket(path: str) -> None:
    """Have this process, and those it starts, go on as if the environment had named the socket."""
    os.environ[KUBELET_SOCKET] = path
