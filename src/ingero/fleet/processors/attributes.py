"""``attributes``: changes attributes of data points, log records and spans.

Source: opentelemetry-collector-contrib ``processor/attributesprocessor`` (key names). Left out: the action
``hash``, and choosing what is changed by ``include`` and ``exclude``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from pydantic import Field

from ingero.config import StrictModel
from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.consumer import Batch, Consumer
from ingero.fleet.factory import ALL_SIGNALS, ProcessorFactory
from ingero.fleet.helpers.attribute_actions import ActionConfig, build_edit, edit_batch, iter_items
from ingero.otlp.names import Signal


class AttributesConfig(StrictModel):
    """What is done."""

    absent_keys: ClassVar[Mapping[str, str]] = {
        "include": "everything that passes is changed; give the rest a pipeline of its own",
        "exclude": "everything that passes is changed; give the rest a pipeline of its own",
    }

    actions: tuple[ActionConfig, ...] = Field(min_length=1, description="Actions, in order.")


class AttributesProcessor:
    """Passes batches on, changed."""

    def __init__(
        self, component: ComponentId, config: AttributesConfig, signal: Signal, following: Consumer
    ) -> None:
        del component, signal
        self._edit = build_edit(config.actions)
        self._following = following

    async def start(self, host: Host) -> None:
        """Nothing to open."""

    async def stop(self) -> None:
        """Nothing to release."""

    def consume(self, batch: Batch) -> None:
        """Change a copy and pass it on; raises PermanentError for JSON that does not fit its protobuf field."""
        self._following.consume(edit_batch(batch, self._edit, iter_items))


FACTORY: Final = ProcessorFactory(
    type="attributes",
    config=AttributesConfig,
    description="Changes attributes of data points, log records and spans.",
    signals=ALL_SIGNALS,
    stability=Stability.BETA,
    create=AttributesProcessor,
    example={"actions": [{"action": "upsert", "key": "site", "value": "a"}]},
)
