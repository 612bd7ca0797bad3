"""The place in the program that a stored stack names, in the words that people use for it."""

from __future__ import annotations

import json
from typing import Any, Final

from ingero.model.recording import Recording
from ingero.model.untrusted import FRAME_CHARS, clean

_MAX_FRAMES: Final = 3


def name_place(recording: Recording, stack_hash: int) -> str:
    """``forward() at train.py:142 < step() at train.py:98``: the innermost Python frames, native ones without any.

    Empty where the recording does not have the stack.
    """
    try:
        frames: Any = json.loads(recording.stacks.get(stack_hash) or "[]")
    except ValueError:
        return ""
    frames = [frame for frame in frames if isinstance(frame, dict)]
    python = [frame for frame in frames if frame.get("pfn")]
    named = [_name_frame(frame) for frame in python or frames]
    return " < ".join([name for name in named if name][:_MAX_FRAMES])


def _name_frame(frame: dict[str, Any]) -> str:
    function = clean(str(frame.get("pfn") or frame.get("s") or ""), FRAME_CHARS)
    if not function or function.startswith("["):
        return ""
    path = str(frame.get("pf") or "")
    line = frame.get("pl")
    where = clean(path.rsplit("/", 1)[-1], FRAME_CHARS) + (f":{line}" if line else "")
    return f"{function}() at {where}" if path else function
