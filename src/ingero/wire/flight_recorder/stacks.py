"""Where the stack of a rank says that it is: in a call of ``torch.distributed``, or in code of its own.

Read are stacks as Python's ``faulthandler`` and ``py-spy dump`` write them: the innermost frame first. The debug server
of PyTorch writes those of all ranks into one text, a heading for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ingero.model.hang import Whereabouts

_HEADING: Final = re.compile(r"^=== Rank (\d+):.*===$", re.MULTILINE)
_THREAD: Final = re.compile(r"^(?:Current thread|Thread)\b", re.MULTILINE)
_FRAME: Final = re.compile(
    r'^\s*(?:File "(?P<file>[^"]+)", line \d+|\S.*? \((?P<where>[^()]+):\d+\)$)'
)
_LIBRARY: Final = "torch/distributed/"
_BESIDE: Final = tuple(f"torch/distributed/{name}/" for name in ("elastic", "debug", "checkpoint"))
"""Parts whose threads wait for something else than another rank's operation."""


def split_ranks(text: str) -> dict[int, str]:
    """The stacks of each rank in a text of the debug server; empty when it has no headings."""
    parts = _HEADING.split(text)
    return {int(rank): body for rank, body in zip(parts[1::2], parts[2::2], strict=True)}


def find_whereabouts(text: str) -> Whereabouts | None:
    """Where the threads of one rank are; None when the text holds no frame."""
    innermost = [file for file in _innermost_files(text) if file]
    if not innermost:
        return None
    is_inside = any(_LIBRARY in file and not any(p in file for p in _BESIDE) for file in innermost)
    return Whereabouts.INSIDE if is_inside else Whereabouts.OUTSIDE


def _innermost_files(text: str) -> Iterator[str]:
    """The file of each thread's innermost frame."""
    for thread in _THREAD.split(text)[1:]:
        for line in thread.splitlines()[1:]:
            frame = _FRAME.match(line)
            if frame is not None:
                yield frame["file"] or frame["where"]
                break
