"""How many examples a property test draws."""

import os

from hypothesis import settings


def draw_examples(usual: int, thorough: int) -> settings:
    """So many in each run of the tests, which draw the same ones, and more where others are drawn: `make fuzz`."""
    is_thorough = os.environ.get("INGERO_PROPERTIES") == "any"
    return settings(max_examples=thorough if is_thorough else usual)
