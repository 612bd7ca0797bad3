"""Every rule, in a literal list. A rule costs a module, a line here, a firing recording and a healthy control."""

from __future__ import annotations

from typing import Final

from ingero.agent.causal.finding import Rule
from ingero.agent.causal.rules import first_use, stalls, starvation

RULES: Final[tuple[Rule, ...]] = (starvation.RULE, first_use.RULE, *stalls.RULES)
"""In the order in which ties are broken."""
