"""Every component there is. Adding one costs a module, a line here, a test, a page in ``docs/`` and a fragment."""

from __future__ import annotations

from typing import Final

from ingero.fleet.exporters import debug, file, otlp, otlphttp
from ingero.fleet.exporters.prometheus import exporter as prometheus
from ingero.fleet.extensions import bearertokenauth, health_check, zpages
from ingero.fleet.extensions.ingero_threshold import extension as ingero_threshold
from ingero.fleet.factory import Factory
from ingero.fleet.processors import batch, memory_limiter, provider_lookup
from ingero.fleet.processors.collectives import processor as nccl
from ingero.fleet.processors.peer_threshold import processor as ingero
from ingero.fleet.receivers import otlp as otlp_receiver

FACTORIES: Final[tuple[Factory, ...]] = (
    otlp_receiver.FACTORY,
    ingero.FACTORY,
    nccl.FACTORY,
    provider_lookup.FACTORY,
    batch.FACTORY,
    memory_limiter.FACTORY,
    prometheus.FACTORY,
    otlphttp.FACTORY,
    otlp.FACTORY,
    file.FACTORY,
    debug.FACTORY,
    ingero_threshold.FACTORY,
    bearertokenauth.FACTORY,
    health_check.FACTORY,
    zpages.FACTORY,
)
"""The components that a configuration may name, in the order that ``ingero-fleet components`` lists them."""
