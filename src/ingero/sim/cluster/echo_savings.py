"""What Echo says that an action saved, once all that Fleet and the remediator forward has arrived."""

from __future__ import annotations

import time
from typing import Any, Final

import httpx

from ingero.sim.local_echo import LocalEcho
from ingero.web_authorities import WebAuthorities

_TOOL: Final = "/api/v2/tools/fleet.cluster.savings"
_SETTLE_S: Final = 20.0
_POLL_S: Final = 1.0


def ask_savings(echo: LocalEcho, cluster_id: str) -> dict[str, Any] | None:
    """The newest action's; None where it received none within twenty seconds.

    Fleet sends what it still has when it ends, so a number that did not change in a second is taken as the last.
    """
    headers = {"Authorization": f"Bearer {echo.token}"}
    body = {"args": {"cluster_id": cluster_id}}
    found: dict[str, Any] | None = None
    deadline_s = time.monotonic() + _SETTLE_S
    with httpx.Client(
        base_url=echo.url, headers=headers, timeout=30, verify=WebAuthorities()
    ) as client:
        while time.monotonic() < deadline_s:
            answer = client.post(_TOOL, json=body)
            answer.raise_for_status()
            savings = answer.json()["result"]["savings"]
            newest = savings[0] if savings else None
            if newest is not None and newest == found:
                break
            found = newest
            time.sleep(_POLL_S)
    return found
