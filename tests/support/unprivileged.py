"""Commands as a user without privileges would run them, for tests that run as root."""

from __future__ import annotations

from typing import Final

NOBODY: Final = 65534
"""User and group id."""

AS_UNPRIVILEGED: Final = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--bounding-set=-all,+dac_read_search", "--inh-caps=-all,+dac_read_search"),
    "--ambient-caps=+dac_read_search",
)
"""Put before a command, runs it as another user who may only read.

The right to read is kept since checkout and interpreter may lie where only root may read.
"""
