"""Gives a decoder bodies until one breaks it: another error than it documents, too long, or too much memory."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Final

from tests.fuzz.mutate import Mutator

LIMIT_S: Final = 2.0
"""Most processor time for one body."""
GROWTH_BYTES: Final = 256 << 20
"""By which the process may grow, for one body or over all, once it has taken the seeds."""
_MAX_POOL: Final = 400
_DETAILS: Final = re.compile(r"[0-9]+|'[^']*'|\"[^\"]*\"|0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder and what follows it.

    Attributes:
        name: What the user types.
        seeds: Bodies that it takes.
        take: Decodes one; whatever it makes of it is used too.
        errors: What it may raise.
    """

    name: str
    seeds: tuple[bytes, ...]
    take: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]


@dataclass(slots=True)
class Outcome:
    """What became of bodies.

    Attributes:
        n_taken: Decoded.
        n_refused: Answered with an error that the decoder documents.
        n_kinds: Different refusals.
        grown_bytes: By how much the most memory that it held at any moment exceeds what it held after the seeds.
        broken: A body that broke it, and how; None where none did.
    """

    n_taken: int = 0
    n_refused: int = 0
    n_kinds: int = 0
    grown_bytes: int = 0
    broken: tuple[bytes, str] | None = None
    kinds: dict[str, int] = field(default_factory=dict)


class _TooLongError(BaseException):
    """No `except Exception` of the decoder stops it."""


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise _TooLongError


def take_one(target: Target, body: bytes) -> str:
    """Give it one body; empty when it was taken, else how it was refused.

    Raises:
        AssertionError: It broke; says how.
    """
    signal.signal(signal.SIGPROF, _interrupt)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        target.take(body)
    except target.errors as error:
        return f"{type(error).__name__}: {_DETAILS.sub('#', str(error))[:80]}"
    except _TooLongError as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-2:])
        raise AssertionError(f"took more than {LIMIT_S} s of processor time, at\n{where}") from None
    except (Exception, RecursionError, MemoryError) as error:
        raise AssertionError("".join(traceback.format_exception(error))) from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ""


def run(target: Target, n_bodies: int, seed: int, note: Callable[[bytes], None]) -> Outcome:
    """Give it mutated bodies; ends at the first that breaks it.

    Args:
        target: The decoder.
        n_bodies: How many.
        seed: Of the choices; the same makes the same bodies.
        note: Gets each body before the decoder does, for whoever looks after a process that crashed.
    """
    mutator, outcome = Mutator(target.seeds, Random(seed)), Outcome()
    for body in target.seeds:
        refused = take_one(target, body)
        assert not refused, f"{target.name} refuses one of its own seeds: {refused}"
    began_bytes = _begin_peak()
    for number in range(n_bodies):
        body = mutator.make()
        note(body)
        try:
            refused = take_one(target, body)
        except AssertionError as error:
            outcome.broken = (body, str(error))
            return outcome
        outcome.n_taken += not refused
        outcome.n_refused += bool(refused)
        is_new = bool(refused) and refused not in outcome.kinds
        outcome.n_kinds += is_new
        # A new refusal came further than others, or elsewhere; what was taken leads away from the seeds.
        if len(mutator.pool) < _MAX_POOL and (is_new or (not refused and not number % 50)):
            mutator.pool.append(body)
        outcome.kinds[refused] = outcome.kinds.get(refused, 0) + 1
        outcome.grown_bytes = _read_peak() - began_bytes
        if outcome.grown_bytes > GROWTH_BYTES:
            outcome.broken = (body, f"the process grew by {outcome.grown_bytes >> 20} MiB")
            return outcome
    return outcome


def _begin_peak() -> int:
    """Forget the peak of this process so far; what it holds now, in bytes.

    The peak of getrusage(2) would not do: it begins with that of the process which started this one. Source: proc_pid_clear_refs(5), value 5.
    """
    Path("/proc/self/clear_refs").write_text("5")
    return _read_peak()


def _read_peak() -> int:
    """The most memory that the process held since `_begin_peak`, in bytes. Source: proc_pid_status(5), VmHWM."""
    status = Path("/proc/self/status").read_bytes()
    start = status.index(b"VmHWM:") + 6
    return int(status[start : status.index(b"kB", start)]) << 10
