"""Every rule, in a literal list. A rule costs a module, a line here, a firing recording and a healthy control."""

from __future__ import annotations

from typing import Final

from ingero.recording.causal.finding import Rule
from ingero.recording.causal.rules import (
    bound,
    collectives,
    contention,
    facts,
    first_use,
    graphs,
    hangs,
    inference,
    leaks,
    links,
    managed,
    memory,
    periodic,
    queueing,
    sharing,
    stalls,
    starvation,
    steps,
    unfinished,
)

RULES: Final[tuple[Rule, ...]] = (
    *facts.RULES,
    starvation.RULE,
    *stalls.RULES,
    contention.RULE,
    sharing.RULE,
    *bound.RULES,
    first_use.RULE,
    *memory.RULES,
    leaks.RULE,
    managed.RULE,
    *graphs.RULES,
    periodic.RULE,
    *inference.RULES,
    queueing.RULE,
    *collectives.RULES,
    *links.RULES,
    hangs.RULE,
    unfinished.RULE,
    steps.RULE,
)
"""In the order in which they look. Adding one: source, a line here, a firing and a healthy recording, a line in the guide."""
