"""Every component there is. Adding one costs a module, a line here, a test, a page in ``docs/`` and a fragment."""

from __future__ import annotations

from typing import Final

from ingero.fleet.factory import Factory

FACTORIES: Final[tuple[Factory, ...]] = ()
"""The components that a configuration may name, in the order that ``ingero-fleet components`` lists them."""
