"""What the extensions that check credentials count alike."""

from __future__ import annotations

from typing import Final

from ingero.telemetry.declare import counter

REFUSED: Final = counter(
    "ingero_fleet_auth_refused_total",
    "Requests refused for a missing or wrong token or password, or one that there was no time to check.",
    "extension",
    "reason",
)
