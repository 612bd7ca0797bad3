"""Text of others in a message to Slack, where ``<`` and ``&`` begin markup: links with a text of their own, mentions.

Source: Slack, "Formatting text for app surfaces": ``&``, ``<`` and ``>`` are written as HTML entities, and no other
character is.
"""

from __future__ import annotations


def escape_slack_text(text: str) -> str:
    """Text that Slack shows as it is, with no mention and no link of another name in it."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
