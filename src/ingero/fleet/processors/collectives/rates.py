"""What a GPU-hour costs, from a table that the operator keeps: providers, models as `nvidia-smi` names them, prices.

A price that is not known stays unknown; nothing is ever charged with zero because of that. There are no prices in the
program: they are the operator's own, and list prices drift.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field

from ingero.config import StrictModel
from ingero.wire.names import PROVIDER_ALIASES

_WORDS: Final = re.compile(r"[a-z0-9]+")

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RatesConfig(StrictModel):
    """Prices of a GPU-hour."""

    currency: str = Field("USD", min_length=1, max_length=16, description="Of every price here.")
    providers: Mapping[str, Mapping[str, Rate]] = Field(
        {},
        description="Provider (the value of ingero.provider) → GPU model → price of a GPU-hour.",
    )
    fallback_rate: Rate | None = Field(
        None, description="Price of a GPU-hour that no entry fits; without it, its cost is unknown."
    )


class Rates:
    """Finds prices.

    Args:
        config: The table.
    """

    def __init__(self, config: RatesConfig) -> None:
        self.currency: Final = config.currency
        self._fallback = config.fallback_rate
        self._tables: dict[str, list[tuple[str, frozenset[str], float]]] = {}
        for provider, models in config.providers.items():
            table = self._tables.setdefault(_normalise(provider), [])
            table += [(name.lower(), _words(name), rate) for name, rate in models.items()]
        self._known: dict[tuple[str, str], float | None] = {}

    def find_rate(self, provider: str, gpu_model: str) -> float | None:
        """Price of a GPU-hour, or None where it is not known.

        The model's own name first; then the one entry whose words all occur in it (``h100-80gb`` fits ``NVIDIA H100
        80GB HBM3``); then the one entry that has all of its words (``NVIDIA L4 24GB`` fits ``NVIDIA L4``); then the
        fallback. Two entries that fit equally well are none.
        """
        key = (_normalise(provider), gpu_model)
        if key not in self._known:
            if len(self._known) >= 10_000:
                self._known.clear()
            self._known[key] = self._find(*key)
        return self._known[key]

    def _find(self, provider: str, gpu_model: str) -> float | None:
        table, words = self._tables.get(provider, ()), _words(gpu_model)
        if not words:
            return self._fallback
        for fits in (
            [rate for name, _, rate in table if name == gpu_model.lower()],
            [rate for _, entry, rate in table if entry and entry <= words],
            [rate for _, entry, rate in table if entry >= words],
        ):
            if len(fits) == 1:
                return fits[0]
        return self._fallback


def _normalise(provider: str) -> str:
    name = provider.strip().lower()
    return PROVIDER_ALIASES.get(name, name)


def _words(name: str) -> frozenset[str]:
    return frozenset(_WORDS.findall(name.lower()))
