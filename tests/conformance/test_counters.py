"""Every counter of loss has a reader that a user meets.

A counter of loss is an attribute that is added to (``+=``, or set to itself plus something) and whose name has a word
that says that something was not kept, not sent, not read or not believed (`LOSS`). What is replaced whole is a state,
such as failures in a row. It is read where code outside the class that declares it and the classes that add to it loads
it from an object that can be of that class. Inside those classes a load counts only where it is

- handed to a log or printed, or set on an instrument of our telemetry,
- in a lambda that is handed to somebody,
- returned or yielded by a method, or put into another attribute, that is itself read in one of these ways.

A comparison that only decides what the class does next is no reader, and neither is `ingero.testing`.
"""

from __future__ import annotations

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import pytest
from tests.conformance.loss_readers import (
    Place,
    Source,
    is_name,
    iter_bound,
    iter_own,
    read_package,
)

import ingero

pytestmark = pytest.mark.xdist_group("counters")  # the package is read once, which takes long

LOSS: Final = re.compile(
    r"(^|_)(lost|loss|losses|dropped|refused|failed|failures|evicted|unknown|unsynced|missed|misses|skipped|rejected"
    r"|throttled|overlong|oversized|broken|overwritten|unheard|superseded|pruned|damaged|unsupported|conflicts|bad|errors"
    r"|stale|late|unplaced|unpaired|incomplete|unseen|aged_out|sized_out|discarded|truncated|stalled|heads)(_|$)"
)
ALLOWED: Final[Mapping[str, str]] = {}
"""Counters that nobody has to read, and why."""

_SPOKEN: Final = re.compile(r"(^|[._])(log|echo|emit|print|tell|warn|say)s?([._]|$)", re.IGNORECASE)
_INSTRUMENT: Final = frozenset({"set", "add", "record", "watch"})
_WHOLE: Final = frozenset({"asdict", "astuple", "fields", "vars", "to_builtins"})
_SHIPPED_FOR_TESTS: Final = "ingero.testing"
Counter: TypeAlias = "tuple[str, str]"
"""A class and an attribute or method of it."""


@dataclass(slots=True)
class Ledger:
    """Who counts and who reads.

    Attributes:
        source: What is searched.
        counters: Counters of loss, and the classes that add to each.
        unclear: Additions of which nobody can tell whose they are.
        loads: Where an attribute or method of a class is loaded.
    """

    source: Source
    counters: dict[Counter, set[str]] = field(default_factory=lambda: defaultdict(set))
    unclear: list[str] = field(default_factory=list)
    loads: dict[Counter, list[tuple[Place, ast.AST]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    _told: dict[str, frozenset[object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        asking = {place.module for place, node in self.source.places if is_asking(node)}
        for name in asking:
            constants = (
                n for n in ast.walk(self.source.trees[name]) if isinstance(n, ast.Constant)
            )
            self._told[name] = frozenset(one.value for one in constants)
        for place, node in self.source.places:
            if place.module.startswith(_SHIPPED_FOR_TESTS):
                continue
            self._note_addition(place, node)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                self._load(place, node, node.value, node.attr)
            elif isinstance(node, ast.Call):
                self._note_whole(place, node)

    def _load(self, place: Place, node: ast.AST, value: ast.AST, name: str) -> None:
        for owner in self.source.owners(self.source.of(value, place), name):
            self.loads[owner, name].append((place, node))

    def _note_addition(self, place: Place, node: ast.AST) -> None:
        target = find_added(node)
        if target is None or not LOSS.search(target.attr):
            return
        owners = self.source.owners(self.source.of(target.value, place), target.attr)
        if not owners:
            self.unclear.append(f"{place.module}: {ast.unparse(node)}")
        for owner in owners:
            self.counters[owner, target.attr].add(place.owner)

    def _note_whole(self, place: Place, node: ast.Call) -> None:
        """Loads by name: a whole object made a dictionary, and attributes that are asked for by a table of names."""
        called = ast.unparse(node.func).rpartition(".")[2]
        is_whole = called in _WHOLE
        told = self._told.get(place.module, frozenset())
        if not is_whole and not told:
            return
        for argument in node.args:
            for key in self.source.of(argument, place):
                for name in self.source.classes[key].holds:
                    if is_whole or name in told:
                        self.loads[key, name].append((place, node))

    # ── Whether somebody is told ────────────────────────────────────────────

    def find_unread(self) -> list[str]:
        """Counters of which no user is told."""
        return sorted(
            f"{owner}.{name}"
            for (owner, name), counting in self.counters.items()
            if not self._is_read((owner, name), frozenset(counting | {owner}), frozenset())
        )

    def _is_read(self, what: Counter, inside: frozenset[str], seen: frozenset[Counter]) -> bool:
        if what in seen:
            return False
        return any(
            place.owner not in inside or self._is_shown(place, node, inside, seen | {what})
            for place, node in self.loads[what]
        )

    def _is_shown(
        self, place: Place, node: ast.AST, inside: frozenset[str], seen: frozenset[Counter]
    ) -> bool:
        """What becomes of a value that its own class loads."""
        child, parent = node, self.source.parents.get(node)
        while parent is not None and parent is not place.function:
            if isinstance(parent, ast.Call) and child is not parent.func and is_telling(parent):
                return True
            if isinstance(parent, ast.Lambda):
                return isinstance(self.source.parents[parent], ast.Call | ast.keyword)
            if isinstance(parent, ast.Return | ast.Yield | ast.YieldFrom):
                return self._is_read((place.owner, place.name), inside, seen)
            if isinstance(parent, ast.Assign | ast.AugAssign | ast.NamedExpr | ast.AnnAssign):
                return self._is_target_shown(place, parent, inside, seen)
            if isinstance(parent, ast.comprehension | ast.For) and child is parent.iter:
                return self._is_target_shown(place, parent, inside, seen)
            child, parent = parent, self.source.parents.get(parent)
        return False

    def _is_target_shown(
        self, place: Place, node: ast.AST, inside: frozenset[str], seen: frozenset[Counter]
    ) -> bool:
        """What becomes of what it is put into: a name of the function, or an attribute."""
        targets = [node.target] if isinstance(node, ast.AugAssign) else []
        targets += [target for target, _, _ in iter_bound(node)]
        for target in targets:
            for one in ast.walk(target):
                if not isinstance(getattr(one, "ctx", None), ast.Store):
                    continue  # the object whose attribute it is
                if isinstance(one, ast.Attribute):
                    owners = self.source.owners(self.source.of(one.value, place), one.attr)
                    if any(self._is_read((owner, one.attr), inside, seen) for owner in owners):
                        return True
                elif isinstance(one, ast.Name) and place.function is not None:
                    key = (f"{place.owner}.{place.name}", one.id)
                    uses = [
                        use
                        for use in iter_own(place.function)
                        if isinstance(use, ast.Name)
                        and use.id == one.id
                        and isinstance(use.ctx, ast.Load)
                    ]
                    if key not in seen and any(
                        self._is_shown(place, use, inside, seen | {key}) for use in uses
                    ):
                        return True
        return False


def find_added(node: ast.AST) -> ast.Attribute | None:
    """The attribute that a statement adds to."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return node.target if isinstance(node.target, ast.Attribute) else None
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp)):
        return None
    target = node.targets[0]
    is_itself = ast.unparse(target) in (ast.unparse(node.value.left), ast.unparse(node.value.right))
    return target if isinstance(target, ast.Attribute) and is_itself else None


def is_telling(call: ast.Call) -> bool:
    """Whether what a call is given is written down for somebody."""
    called = ast.unparse(call.func)
    return bool(_SPOKEN.search(called)) or (
        isinstance(call.func, ast.Attribute) and call.func.attr in _INSTRUMENT
    )


def is_asking(node: ast.AST) -> bool:
    """Whether it asks for an attribute whose name is in a variable."""
    return (
        isinstance(node, ast.Call)
        and is_name(node.func, "getattr")
        and not isinstance(node.args[1], ast.Constant)
    )


def build_ledger(texts: Mapping[str, str]) -> Ledger:
    """Read modules, by dotted name."""
    return Ledger(Source({name: ast.parse(text) for name, text in texts.items()}))


@pytest.fixture(scope="module")
def package() -> Ledger:
    """Our own source. It becomes millions of objects, none of them garbage: looking for some would take a third of the time."""
    gc.disable()
    try:
        return build_ledger(read_package(Path(ingero.__file__).parent, "ingero"))
    finally:
        gc.enable()


def test_every_counter_of_loss_is_read_by_somebody(package):
    assert not package.unclear, f"nobody can tell whose these are; annotate: {package.unclear}"
    unread = [name for name in package.find_unread() if name not in ALLOWED]
    assert not unread, f"no series, output, check or log line shows these: {unread}"


def test_the_allow_list_only_names_counters_that_need_it(package):
    assert set(ALLOWED) <= set(package.find_unread())


def test_the_counters_that_are_known_are_found(package):
    known = {".".join(what).removeprefix("ingero.") for what in package.counters}
    assert known >= {
        "agent.collectives.run_queue.PushCounts.n_dropped",
        "agent.events.alert.delivery.DeliveryCounts.n_dropped",
        "agent.metrics.gpus.GpuWatch.n_dropped",
        "echo.db.writer_settings.DatabaseWriterCounters.refused_rows",
        "fleet.helpers.sending_report.SendingReport._n_lost",
        "recording.store.settings.WriterCounters.events_lost",
        "serving.connections.ConnectionCounters.slow_heads",
    }


QUEUE: Final = """
class Counts:
    n_dropped: int = 0

class Queue:
    def __init__(self) -> None:
        self.counts = Counts()
        self.n_lost = 0

    def offer(self, one: object) -> None:
        self.counts.n_dropped += 1
        self.n_lost += 1
        if self.n_lost > 3:
            self.close()

    def close(self) -> None: ...
"""
LIST_OF_QUEUES: Final = """
from package.queue import Queue

def show(queues: list[Queue]) -> list[int]:
    return [queue.counts.n_dropped + queue.n_lost for queue in queues]
"""


def unread(**texts: str) -> list[str]:
    """Of a package of these modules, what nobody reads."""
    ledger = build_ledger({f"package.{name}": text for name, text in texts.items()})
    assert not ledger.unclear
    return ledger.find_unread()


def in_queue(lines: str) -> str:
    """The queue with more lines at the end of its class."""
    return QUEUE + "\n".join(f"    {line}" for line in lines.splitlines()) + "\n"


def test_a_counter_that_only_decides_what_its_class_does_is_unread():
    assert unread(queue=QUEUE) == ["package.queue.Counts.n_dropped", "package.queue.Queue.n_lost"]
    assert unread(queue=QUEUE, reader=LIST_OF_QUEUES) == []


def test_a_reader_of_another_class_with_the_same_name_excuses_nobody():
    other = QUEUE.replace("Counts", "Sums").replace("Queue", "Stack")
    reader = LIST_OF_QUEUES.replace("package.queue", "package.other").replace("Queue", "Stack")
    assert unread(queue=QUEUE, other=other, reader=reader) == [
        "package.queue.Counts.n_dropped",
        "package.queue.Queue.n_lost",
    ]


def test_a_reader_that_is_shipped_for_tests_is_none():
    texts = {"ingero.queue": QUEUE}
    reader = LIST_OF_QUEUES.replace("package.", "ingero.")
    assert build_ledger(texts | {"ingero.shown": reader}).find_unread() == []
    assert len(build_ledger(texts | {"ingero.testing.shown": reader}).find_unread()) == 2


def test_a_property_counts_only_where_it_is_read():
    text = in_queue(
        "@property\ndef all_lost(self) -> int:\n    return self.n_lost + self.counts.n_dropped"
    )
    assert len(unread(queue=text)) == 2
    reader = "from package.queue import Queue\n\ndef show(queue: Queue) -> int:\n    return queue.all_lost\n"
    assert unread(queue=text, reader=reader) == []


@pytest.mark.parametrize(
    "line",
    [
        "_LOG.warning('%d', self.n_lost)",
        "n_lost = self.n_lost\n    self._log.write('lost', n=n_lost)",
        "LOST.set(self.n_lost)",
        "self._meter.gauge(LOST).watch(lambda: self.n_lost)",
    ],
)
def test_a_class_that_tells_its_own_counter_is_a_reader(line):
    assert unread(queue=in_queue(f"def tell(self) -> None:\n    {line}")) == [
        "package.queue.Counts.n_dropped"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "n = self.n_lost",
        "self._n = self.n_lost",
        "self._n = self.n_lost\n    _LOG.info(self.name)",
        "self._next(self.n_lost)",
    ],
)
def test_a_value_that_is_put_away_and_not_used_is_unread(line):
    assert "package.queue.Queue.n_lost" in unread(
        queue=in_queue(f"def keep(self) -> None:\n    {line}")
    )


@pytest.mark.parametrize(
    "shown",
    ["asdict(queue.counts)", "[getattr(queue.counts, name) for name in NAMES]"],
)
def test_a_reader_by_name_reads_what_it_names(shown):
    reader = (
        "from dataclasses import asdict\nfrom package.queue import Queue\nNAMES = ('n_dropped',)\n\n"
        f"def show(queue: Queue) -> object:\n    return {shown}\n"
    )
    assert unread(queue=QUEUE, reader=reader) == ["package.queue.Queue.n_lost"]


def test_an_addition_of_which_nobody_can_tell_whose_it_is_is_told():
    text = "def drop(counts):\n    counts.n_dropped += 1\n"
    assert build_ledger({"package.queue": text}).unclear == ["package.queue: counts.n_dropped += 1"]
