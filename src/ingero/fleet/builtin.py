"""Every component there is. Adding one costs a module, a line here, a test, a page in ``docs/`` and a fragment."""

from __future__ import annotations

from typing import Final

from ingero.fleet.exporters.prometheus.exporter import FACTORY as PROMETHEUS
from ingero.fleet.factory import Factory
from ingero.fleet.processors.ingero.processor import FACTORY as INGERO

FACTORIES: Final[tuple[Factory, ...]] = (
    INGERO,
    PROMETHEUS,
)
"""The components that a configuration may name, in the order that ``ingero-fleet components`` lists them."""
