"""``resource``: changes attributes of resources.

Source: opentelemetry-collector-contrib ``processor/resourceprocessor`` (key names). Left out: the action ``hash``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from pydantic import Field

from ingero.config import StrictModel
from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.consumer import Batch, Consumer
from ingero.fleet.factory import ALL_SIGNALS, ProcessorFactory
from ingero.fleet.helpers.attribute_actions import (
    ActionConfig,
    build_edit,
    edit_batch,
    iter_resources,
)
from ingero.otlp.names import Signal


class ResourceConfig(StrictModel):
    """What is done."""

    absent_keys: ClassVar[Mapping[str, str]] = {
        "include": "everything that passes is changed; give the rest a pipeline of its own",
        "exclude": "everything that passes is changed; give the rest a pipeline of its own",
    }

    attributes: tuple[ActionConfig, ...] = Field(min_length=1, description="Actions, in order.")


class ResourceProcessor:
    """Passes batches on, changed."""

    def __init__(
        self, component: ComponentId, config: ResourceConfig, signal: Signal, following: Consumer
    ) -> None:
        del component, signal
        self._edit = build_edit(config.attributes)
        self._following = following

    async def start(self, host: Host) -> None:
        """Nothing to open."""

    async def stop(self) -> None:
        """Nothing to release."""

    def consume(self, batch: Batch) -> None:
        """Change a copy and pass it on; raises PermanentError for JSON that does not fit its protobuf field."""
        self._following.consume(edit_batch(batch, self._edit, iter_resources))


FACTORY: Final = ProcessorFactory(
    type="resource",
    config=ResourceConfig,
    description="Changes attributes of resources.",
    signals=ALL_SIGNALS,
    stability=Stability.BETA,
    create=ResourceProcessor,
    example={"attributes": [{"action": "upsert", "key": "site", "value": "a"}]},
)
