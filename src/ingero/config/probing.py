"""How calls of libraries are probed: one setting for every command that probes, and for the processes it starts."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Final

from ingero.errors import ConfigError

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
