"""Pages of PyTorch's debug server as a browser or ``curl`` saves them: what every rank answered, in one file.

Source: torch/distributed/debug/_frontend.py of PyTorch 2.13.0, ``JSON_RESP_TEMPLATE`` and ``RAW_RESP_TEMPLATE``. The
page is HTML whose answers stand unescaped between ``<pre>`` tags.
"""

from __future__ import annotations

import re
from typing import Final

_ANSWER: Final = re.compile(
    r"<h2>Rank (?P<rank>\d+):[^<]*</h2>\s*(?P<failed><p>Failed to fetch[^<]*</p>\s*)?<pre>(?P<body>.*?)</pre>",
    re.DOTALL,
)


def split_answers(page: str) -> dict[int, str | None]:
    """What each rank answered; None for a rank that did not. Empty when it is no such page."""
    return {
        int(answer["rank"]): None if answer["failed"] else answer["body"]
        for answer in _ANSWER.finditer(page)
    }
