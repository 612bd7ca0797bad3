"""Environment variables that are switches of their own, each with its reason."""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ingero.errors import ConfigError
from ingero.header_values import clean_header_value

PROBE_MODE: Final = "INGERO_PROBE_MODE"
"""Forces a way to probe; the option ``--probe-mode`` sets it for its command and for what that starts."""


class ProbeMode(enum.StrEnum):
    """The ways to probe a call, the cheapest first, and the choice among them."""

    SESSION = "session"
    """One link for a whole file, whose program decides at the entry whether it wants the return: Linux 6.13."""
    PAIR = "pair"
    """Two multi-uprobe links for a whole file: Linux 6.6."""
    EVENT = "event"
    """A perf event for each entry and each return, distinguished by a cookie: Linux 5.15."""
    AUTO = "auto"
    """The first of them that the kernel takes."""


def read_probe_mode(environ: Mapping[str, str] | None = None) -> ProbeMode:
    """``$INGERO_PROBE_MODE``; `ProbeMode.AUTO` where it is not set.

    Raises:
        ConfigError: There is no such way.
    """
    text = (os.environ if environ is None else environ).get(PROBE_MODE) or ProbeMode.AUTO
    try:
        return ProbeMode(text)
    except ValueError as error:
        known = ", ".join(ProbeMode)
        raise ConfigError(f"{PROBE_MODE}: there is no way to probe {text!r}", hint=known) from error


def set_probe_mode(mode: ProbeMode) -> None:
    """Have this process, and those it starts, go on as if the environment had named the way."""
    os.environ[PROBE_MODE] = mode.value


DATABASE: Final = "INGERO_DB"
"""Path of the recording; beats the default."""


def default_database(environ: Mapping[str, str] | None = None) -> Path:
    """``$INGERO_DB``, or ``.ingero/ingero.db`` in the home of the user who called sudo, of this user, or in /tmp."""
    values = os.environ if environ is None else environ
    if values.get(DATABASE):
        return Path(values[DATABASE])
    home = values.get("HOME") or "/tmp"  # noqa: S108 - the documented last resort of the existing agent
    if os.geteuid() == 0 and values.get("SUDO_USER"):
        home = str(Path(f"~{values['SUDO_USER']}").expanduser())
    return Path(home) / ".ingero" / "ingero.db"


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


RINGS: Final = "INGERO_NCCL_DIR"
"""Parent of the rings' folders, for the plug-in (ncclprof/ring.c) and the agent alike; beats the default."""


def ring_parent(environ: Mapping[str, str] | None = None) -> Path:
    """``$INGERO_NCCL_DIR`` or ``/dev/shm``, as the traced process sees it."""
    values = os.environ if environ is None else environ
    return Path(values.get(RINGS) or "/dev/shm")  # noqa: S108 - folders in it are their owners' alone


LOOSE_KEYS: Final = "INGERO_TLS_ALLOW_LOOSE_KEY_PERMS"
"""Accept a private key that others may read; Kubernetes sets group bits on secrets when a pod has an ``fsGroup``."""


def allows_loose_keys(environ: Mapping[str, str] | None = None) -> bool:
    """True when the operator said ``INGERO_TLS_ALLOW_LOOSE_KEY_PERMS=1``."""
    return (os.environ if environ is None else environ).get(LOOSE_KEYS) == "1"


LOOSE_TOKENS: Final = "INGERO_ALLOW_LOOSE_TOKEN_PERMS"
"""Accept a file with bearer tokens that others may read; Kubernetes mounts secrets as 0644 by default."""


def allows_loose_tokens(environ: Mapping[str, str] | None = None) -> bool:
    """True when the operator said ``INGERO_ALLOW_LOOSE_TOKEN_PERMS=1``."""
    return (os.environ if environ is None else environ).get(LOOSE_TOKENS) == "1"


BEARER: Final = "INGERO_MCP_BEARER_TOKEN"
"""Bearer of a node's dashboard and MCP over HTTP. A flag would show it to every user of the machine."""
_BEARER_FORM: Final = f"such as {BEARER}=$(openssl rand -hex 32)"


def read_bearer(environ: Mapping[str, str] | None = None) -> str:
    """The node's bearer token, without the line end of the file that it comes from; empty when there is none.

    Raises:
        ConfigError: It cannot stand in a header, or is nothing but white space; its text is not quoted.
    """
    text = (os.environ if environ is None else environ).get(BEARER, "")
    try:
        token = clean_header_value(text)
    except ValueError as error:
        raise ConfigError(f"{BEARER} {error}", hint=_BEARER_FORM) from error
    if text and not token:
        raise ConfigError(f"{BEARER} holds no bearer token", hint=_BEARER_FORM)
    return token


def set_bearer(token: str) -> None:
    """Have this process go on as if the environment had named the token."""
    os.environ[BEARER] = token


PAGERDUTY_KEY: Final = "INGERO_PAGERDUTY_KEY"
"""Routing key of the PagerDuty service that MCP's ``pagerduty_trigger`` may page; a secret, so not a flag."""


def read_pagerduty_key(environ: Mapping[str, str] | None = None) -> str:
    """The routing key; empty when paging was not asked for."""
    return (os.environ if environ is None else environ).get(PAGERDUTY_KEY, "")


def quiet_grpc() -> None:
    """Keep gRPC's core from writing to standard error unless the user asked for it; call it before grpc is imported.

    Source: grpc, doc/environment_variables.md, ``GRPC_VERBOSITY``.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


START_TIMEOUT: Final = "INGERO_START_TIMEOUT"
"""Seconds that a part of ``ingero up`` or ``replay`` may take to start, or to go on; an emulated machine beside other
work needs more than the default."""
DEFAULT_START_TIMEOUT_S: Final = 180.0


def read_start_timeout(environ: Mapping[str, str] | None = None) -> float:
    """``$INGERO_START_TIMEOUT`` in seconds, `DEFAULT_START_TIMEOUT_S` where it is not set.

    Raises:
        ConfigError: It is no number of seconds above 0.
    """
    text = (os.environ if environ is None else environ).get(START_TIMEOUT, "")
    if not text:
        return DEFAULT_START_TIMEOUT_S
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0.0 < timeout_s < math.inf:
        raise ConfigError(f"{START_TIMEOUT}={text!r} is no number of seconds above 0")
    return timeout_s


READY_FD: Final = "INGERO_READY_FD"
"""Number of an inherited descriptor on which a program reports that it is ready; see `ingero.serving.ready`."""


def take_ready_fd() -> str | None:
    """The value of `READY_FD`, which the programs that this one starts do not inherit; None where it is not set."""
    return os.environ.pop(READY_FD, None)


NOTIFY_SOCKET: Final = "NOTIFY_SOCKET"
"""Where systemd waits for a program to be ready: sd_notify(3)."""


def take_notify_socket() -> str | None:
    """The value of `NOTIFY_SOCKET`, which programs that this one starts do not inherit; None where it is not set."""
    return os.environ.pop(NOTIFY_SOCKET, None)


def build_environment(added: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with these variables set."""
    return {**os.environ, **added}


_OF_A_JOB: Final = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURMD_NODENAME", "POD_NAME", "POD_NAMESPACE")


def read_job() -> dict[str, str]:
    """What says which job, step and pod this process is of, for processes that get nothing else of its environment."""
    return {name: os.environ[name] for name in _OF_A_JOB if name in os.environ}
