"""The guide names every rule."""

from pathlib import Path

from ingero.recording.causal.rules import RULES

GUIDE = (Path(__file__).resolve().parents[2] / "docs/guides/explain.md").read_text()


def test_guide_says_what_each_rule_means():
    assert not [rule.name for rule in RULES if f"`{rule.name}`" not in GUIDE]
