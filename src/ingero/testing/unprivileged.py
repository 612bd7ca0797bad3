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
"""Put before a command: another user, who may only read, since checkout and interpreter may lie where only root may look."""
