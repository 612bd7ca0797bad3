"""Every component there is. Adding one costs a module, a line here, a test, a page in ``docs/`` and a fragment."""

from __future__ import annotations

from typing import Final

from ingero.fleet.exporters import debug, file, otlp, otlphttp
from ingero.fleet.exporters.prometheus import exporter as prometheus
from ingero.fleet.exporters.prometheusremotewrite import exporter as prometheusremotewrite
from ingero.fleet.extensions import (
    basicauth,
    bearertokenauth,
    file_storage,
    health_check,
    healthee,
    zpages,
)
from ingero.fleet.extensions.ingero_threshold import extension as ingero_threshold
from ingero.fleet.factory import Factory
from ingero.fleet.processors import (
    attributes,
    batch,
    memory_limiter,
    provider_lookup,
    resource,
)
from ingero.fleet.processors import (
    filter as filter_processor,
)
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
    attributes.FACTORY,
    resource.FACTORY,
    filter_processor.FACTORY,
    prometheus.FACTORY,
    prometheusremotewrite.FACTORY,
    otlphttp.FACTORY,
    otlp.FACTORY,
    file.FACTORY,
    debug.FACTORY,
    ingero_threshold.FACTORY,
    bearertokenauth.FACTORY,
    basicauth.FACTORY,
    file_storage.FACTORY,
    health_check.FACTORY,
    healthee.FACTORY,
    zpages.FACTORY,
)
"""The components that a configuration may name, in the order that ``ingero-fleet components`` lists them."""
