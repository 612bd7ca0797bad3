"""Wiring: who gets what, in which order, one at a time, and what comes back."""

import asyncio
import threading

import pytest

from ingero.config import StrictModel
from ingero.config.document import parse_document
from ingero.errors import IngeroError, PermanentError, RetryableError
from ingero.fleet.component import ComponentKind
from ingero.fleet.config import build_config
from ingero.fleet.consumer import Batch
from ingero.fleet.factory import (
    ExporterFactory,
    ExtensionFactory,
    ProcessorFactory,
    ReceiverFactory,
)
from ingero.fleet.graph import PIPELINE_REFUSED, FanOut, build_graph
from ingero.fleet.helpers.sending_report import ENQUEUE_FAILED
from ingero.fleet.service import FleetService, Generation
from ingero.fleet.states import SharedStates
from ingero.otlp.codec import build_gauge, build_metrics, build_number
from ingero.otlp.names import Signal
from ingero.telemetry.log import read_fields
from ingero.telemetry.metrics import MeterRegistry
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S


class Empty(StrictModel):
    pass


class Probe:
    """A component of any kind that writes down what happens to it."""

    def __init__(self, name, journal, following=None, *, fails=False):
        self.name, self.journal, self.following, self.fails = name, journal, following, fails
        self.error = self.refusal = None

    def find_refusal(self, batch):
        return self.refusal

    async def start(self, host):
        if self.fails:
            raise IngeroError("cannot")
        self.host = host
        self.journal.append(f"start {self.name}")

    async def stop(self):
        self.journal.append(f"stop {self.name}")

    def consume(self, batch):
        self.journal.append(self.name)
        if self.error is not None:
            raise self.error
        if self.following is not None:
            self.following.consume(batch)


class Kit:
    """Factories whose components are probes."""

    def __init__(self):
        self.journal = []
        self.made = {}
        self.outputs = {}
        self.fails = set()

    def _probe(self, component, following=None):
        name = str(component)
        probe = Probe(name, self.journal, following, fails=name in self.fails)
        self.made.setdefault(name, []).append(probe)
        return probe

    def _receiver(self, component, config, outputs):
        self.outputs[str(component)] = outputs
        return self._probe(component)

    @property
    def factories(self):
        facts = {"config": Empty, "description": "A probe."}
        return (
            ReceiverFactory(type="r", create=self._receiver, **facts),
            ProcessorFactory(type="p", create=lambda one, config, signal, following: self._probe(one, following), **facts),
            ExporterFactory(type="e", create=lambda one, config: self._probe(one), **facts),
            ExtensionFactory(type="x", create=lambda one, config: self._probe(one), **facts),
        )  # fmt: skip

    def config(self, pipelines, extensions="[]"):
        text = (
            "receivers: {r: , r/2: }\nprocessors: {p/1: , p/2: }\nexporters: {e/1: , e/2: }\n"
            f"extensions: {{x: }}\nservice:\n  extensions: {extensions}\n  pipelines:\n{pipelines}"
        )
        return build_config(parse_document(text, environ={}), self.factories)

    def graph(self, pipelines):
        return build_graph(self.config(pipelines), self.factories, MeterRegistry(), ManualClock())


def _batch(n_points=1):
    points = [build_number(float(index), 1) for index in range(n_points)]
    return Batch(Signal.METRICS, build_metrics({}, [build_gauge("m", points)], "test"), 1)


CHAIN = "    metrics: {receivers: [r], processors: [p/1, p/2], exporters: [e/1, e/2]}\n"


def test_batch_passes_processors_in_order_and_reaches_every_exporter():
    kit = Kit()
    kit.graph(CHAIN)
    kit.outputs["r"][Signal.METRICS].consume(_batch())
    assert kit.journal == ["p/1", "p/2", "e/1", "e/2"]


def test_receiver_gets_only_the_signals_that_want_it_and_feeds_all_their_pipelines():
    kit = Kit()
    kit.graph(
        "    metrics: {receivers: [r], exporters: [e/1]}\n"
        "    metrics/b: {receivers: [r, r/2], exporters: [e/2]}\n"
        "    logs: {receivers: [r/2], exporters: [e/1]}\n"
    )
    assert set(kit.outputs["r"]) == {Signal.METRICS}
    assert set(kit.outputs["r/2"]) == {Signal.METRICS, Signal.LOGS}
    kit.outputs["r"][Signal.METRICS].consume(_batch())
    assert kit.journal == ["e/1", "e/2"]
    assert {name: len(made) for name, made in kit.made.items()} == {
        "e/1": 1, "e/2": 1, "r": 1, "r/2": 1,
    }  # fmt: skip


def test_processor_has_one_instance_per_pipeline():
    kit = Kit()
    kit.graph(CHAIN + "    metrics/b: {receivers: [r], processors: [p/1], exporters: [e/1]}\n")
    assert len(kit.made["p/1"]) == 2


@pytest.mark.parametrize("refusing", [0, 1])
@pytest.mark.parametrize("refusal", [RetryableError("full"), PermanentError("no")])
def test_what_one_exporter_refuses_is_taken_once_by_the_other(refusing, refusal):
    kit, meter = Kit(), MeterRegistry()
    build_graph(kit.config(CHAIN), kit.factories, meter, ManualClock())
    kit.made[f"e/{refusing + 1}"][0].error = refusal
    kit.outputs["r"][Signal.METRICS].consume(
        _batch(3)
    )  # taken: its sender has no reason to come again
    assert kit.journal[-2:] == ["e/1", "e/2"]
    is_loss = isinstance(refusal, RetryableError)
    assert _enqueue_failed(meter) == {
        ("e/1",): 3 * (is_loss and refusing == 0),
        ("e/2",): 3 * (is_loss and refusing == 1),
    }


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (RetryableError("a"), RetryableError("b"), RetryableError),
        (PermanentError("a"), RetryableError("b"), RetryableError),
        (PermanentError("a"), PermanentError("b"), PermanentError),
    ],
)
def test_batch_that_nobody_took_is_refused_and_no_loss(first, second, expected):
    kit, meter = Kit(), MeterRegistry()
    build_graph(kit.config(CHAIN), kit.factories, meter, ManualClock())
    kit.made["e/1"][0].error, kit.made["e/2"][0].error = first, second
    with pytest.raises(expected):
        kit.outputs["r"][Signal.METRICS].consume(_batch())
    assert kit.journal[-2:] == ["e/1", "e/2"]
    assert set(_enqueue_failed(meter).values()) == {0}


def test_batch_reaches_nobody_while_one_exporter_is_full_and_works():
    kit, meter = Kit(), MeterRegistry()
    build_graph(kit.config(CHAIN), kit.factories, meter, ManualClock())
    kit.made["e/2"][0].refusal = RetryableError("full")
    with pytest.raises(RetryableError, match="full"):
        kit.outputs["r"][Signal.METRICS].consume(_batch())
    assert kit.journal == ["p/1", "p/2"]
    assert set(_enqueue_failed(meter).values()) == {0}


def test_exporter_that_loses_is_told_once_and_that_it_is_over(caplog):
    caplog.set_level("INFO")
    kit, clock = Kit(), ManualClock()
    build_graph(kit.config(CHAIN), kit.factories, MeterRegistry(), clock)
    kit.made["e/1"][0].error = RetryableError("the queue is full")
    for _ in range(5):
        kit.outputs["r"][Signal.METRICS].consume(_batch(2))
    clock.advance(90 * NS_PER_S)
    kit.made["e/1"][0].error = None
    kit.outputs["r"][Signal.METRICS].consume(_batch())
    assert [(record.getMessage(), read_fields(record)) for record in caplog.records] == [
        (
            "items lost that other exporters took",
            {"exporter": "e/1", "items": 2, "items_lost": n, "error": "the queue is full"},
        )
        for n in (2, 4)
    ] + [
        ("exporter takes everything again", {"exporter": "e/1", "items_lost": 10, "suppressed": 3})
    ]


def test_pipeline_that_refuses_what_another_took_counts_it_as_lost():
    kit, meter = Kit(), MeterRegistry()
    kit_config = kit.config(
        "    metrics: {receivers: [r], exporters: [e/1]}\n"
        "    metrics/b: {receivers: [r], exporters: [e/2]}\n"
    )
    build_graph(kit_config, kit.factories, meter, ManualClock())
    kit.made["e/2"][0].error = RetryableError("full")
    kit.outputs["r"][Signal.METRICS].consume(_batch())
    refused = next(one for one in meter if one.metric is PIPELINE_REFUSED)
    found = {values: series.read() for values, series in refused.series.items() if series.read()}
    assert found == {("metrics/b", "retryable"): 1, ("metrics/b", "lost"): 1}


def _enqueue_failed(meter):
    counter = next(one for one in meter if one.metric is ENQUEUE_FAILED[Signal.METRICS])
    return {values: series.read() for values, series in counter.series.items()}


def test_fan_out_asks_for_the_longest_delay():
    probes = [Probe(str(index), []) for index in range(3)]
    probes[0].error = RetryableError("a", retry_after_ns=5)
    probes[1].error = RetryableError("b", retry_after_ns=9)
    probes[2].error = RetryableError("c")
    with pytest.raises(RetryableError) as caught:
        FanOut(probes).consume(_batch())
    assert caught.value.retry_after_ns == 9
    assert caught.value.message == "a; b; c"


def test_items_are_counted_into_and_out_of_each_processor():
    kit, meter = Kit(), MeterRegistry()
    graph = build_graph(kit.config(CHAIN), kit.factories, meter, ManualClock())
    graph.heads[0].consume(_batch(3))
    kit.made["p/1"][0].following = None
    graph.heads[0].consume(_batch(2))
    read = {
        (one.metric.name, values[0]): series.read()
        for one in meter
        if one.metric.name.startswith("otelcol_processor")
        for values, series in one.series.items()
    }
    assert read == {
        ("otelcol_processor_incoming_items_total", "p/1"): 5,
        ("otelcol_processor_outgoing_items_total", "p/1"): 3,
        ("otelcol_processor_incoming_items_total", "p/2"): 3,
        ("otelcol_processor_outgoing_items_total", "p/2"): 3,
    }


def test_one_pipeline_takes_one_batch_at_a_time():
    kit = Kit()
    graph = kit.graph(CHAIN)
    inside, overlaps, entered = [], [], threading.Barrier(4)

    class Watching:
        def consume(self, batch):
            inside.append(1)
            overlaps.append(len(inside))
            threading.Event().wait(0.001)  # gives the others the chance to come in
            inside.pop()

    kit.made["p/1"][0].following = Watching()

    def push():
        entered.wait()
        for _ in range(10):
            graph.heads[0].consume(_batch())

    threads = [threading.Thread(target=push) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(overlaps) == 1
    assert len(overlaps) == 40


def test_refusals_are_counted_and_kept_for_the_debug_page():
    kit, meter = Kit(), MeterRegistry()
    graph = build_graph(kit.config(CHAIN), kit.factories, meter, ManualClock())
    kit.made["p/2"][0].error = PermanentError("no good")
    with pytest.raises(PermanentError):
        graph.heads[0].consume(_batch())
    view = graph.heads[0].view([1, 0])
    assert view.errors == ((1_767_225_600_000_000_000, "no good"),)


def _generation(kit, pipelines=CHAIN):
    service = FleetService(lambda: pytest.fail("not asked for"), kit.factories)
    return Generation(service, kit.config(pipelines, "[x]"))


def test_start_goes_downstream_first_and_stop_the_other_way():
    kit = Kit()

    async def scenario():
        generation = _generation(kit)
        await generation.start()
        await generation.stop(10**9)

    asyncio.run(scenario())
    starts = ["x", "e/1", "e/2", "p/2", "p/1", "r"]
    assert kit.journal == [
        *(f"start {one}" for one in starts),
        *(f"stop {one}" for one in reversed(starts)),
    ]


def test_failed_start_names_the_component_and_stops_what_ran():
    kit = Kit()
    kit.fails = {"p/2"}

    async def scenario():
        with pytest.raises(IngeroError, match=r"^processors\.p/2: cannot$"):
            await _generation(kit).start()

    asyncio.run(scenario())
    assert kit.journal == [
        "start x",
        "start e/1",
        "start e/2",
        "stop p/2",
        "stop e/2",
        "stop e/1",
        "stop x",
    ]


def test_capability_is_found_by_type_and_by_who_offered_it():
    kit = Kit()

    class Offer(Probe):
        pass

    async def scenario():
        generation = _generation(kit)
        await generation.start()
        await generation.stop(10**9)
        return generation

    generation = asyncio.run(scenario())
    x = kit.made["x"][0]
    generation._starting = next(
        node for node in generation.graph.nodes if node.kind is ComponentKind.EXTENSION
    )
    generation.offer(Probe, x)
    assert generation.find(Probe) == [x]
    assert generation.find(Probe, generation._starting.id) == [x]
    assert generation.find(Probe, generation.graph.nodes[-1].id) == []
    assert generation.find(Offer) == []


def _without_processors(kit):
    return build_config(
        parse_document(
            "receivers: {r: }\nexporters: {e/1: }\nservice: {pipelines: {metrics: {receivers: [r], exporters: [e/1]}}}",
            environ={},
        ),
        kit.factories,
    )


class Forgettable:
    n_discards = 0
    n_ends = 0

    def discard(self):
        self.n_discards += 1

    def end(self):
        self.n_ends += 1


def test_shared_state_lives_while_its_settings_do():
    kit = Kit()
    states = SharedStates()
    state = states.get(("p/1", "map"), Forgettable)
    assert states.get(("p/1", "map"), Forgettable) is state
    same = kit.config(CHAIN)
    before = states.set_aside_changed(same, kit.config(CHAIN))
    assert states.get(("p/1", "map"), Forgettable) is state
    states.discard_unused(before)
    assert not state.n_discards
    before = states.set_aside_changed(same, _without_processors(kit))
    other = states.get(("p/1", "map"), Forgettable)
    assert other is not state
    assert not state.n_discards, "the new configuration may not start"
    states.discard_unused(before)
    assert (state.n_discards, other.n_discards) == (1, 0)


def test_shared_states_come_back_when_a_reload_does_not_start():
    kit = Kit()
    states = SharedStates()
    state = states.get(("p/1", "map"), Forgettable)
    kept = states.get(("e/1", "map"), Forgettable)
    before = states.set_aside_changed(kit.config(CHAIN), _without_processors(kit))
    built = [states.get((name, "map"), Forgettable) for name in ("p/1", "p/3")]
    states.restore(before)
    assert states.get(("p/1", "map"), Forgettable) is state
    assert states.get(("e/1", "map"), Forgettable) is kept
    assert states.get(("p/3", "map"), Forgettable) not in built
    assert (state.n_discards, kept.n_discards) == (0, 0)
    assert [one.n_discards for one in built] == [1, 1]


def test_a_shared_state_of_no_component_outlives_every_reload():
    kit = Kit()
    states = SharedStates()
    state = states.get(("", "files"), Forgettable)
    before = states.set_aside_changed(kit.config(CHAIN), _without_processors(kit))
    assert states.get(("", "files"), Forgettable) is state
    states.restore(before)
    assert states.get(("", "files"), Forgettable) is state
    assert not state.n_discards


def test_shared_states_end_with_the_service_also_those_that_were_forgotten():
    kit = Kit()
    states = SharedStates()
    gone, kept, plain = (
        states.get((name, "map"), build)
        for name, build in (("p/1", Forgettable), ("e/1", Forgettable), ("e/2", dict))
    )
    states.discard_unused(states.set_aside_changed(kit.config(CHAIN), _without_processors(kit)))
    states.end()
    assert (gone.n_discards, gone.n_ends) == (1, 1)
    assert (kept.n_discards, kept.n_ends, plain) == (0, 1, {})


def test_a_state_of_a_place_outlives_every_reload():
    kit = Kit()
    states = SharedStates()
    state = states.get(("/var/lib/x", "queue"), Forgettable)
    states.discard_unused(states.set_aside_changed(kit.config(CHAIN), _without_processors(kit)))
    assert states.get(("/var/lib/x", "queue"), Forgettable) is state
    assert not state.n_discards


def test_timer_repeats_and_outlives_an_error():
    kit = Kit()

    async def scenario():
        loop = asyncio.get_running_loop()
        logged = []
        loop.set_exception_handler(lambda loop, context: logged.append(context["exception"]))
        generation = _generation(kit)
        await generation.start()
        fired, enough = [], asyncio.Event()

        def action():
            fired.append(1)
            if len(fired) == 3:
                enough.set()
            if len(fired) == 1:
                raise ValueError("once")

        generation.every(1_000_000, action)
        await enough.wait()
        await generation.stop(10**9)
        n_fired = len(fired)
        await asyncio.sleep(0)
        return logged, n_fired, len(fired)

    logged, before, after = asyncio.run(scenario())
    assert [str(one) for one in logged] == ["once"]
    assert before == after


def test_timer_of_a_component_ends_before_its_stop():
    kit = Kit()

    async def scenario():
        generation = _generation(kit)
        await generation.start()
        probe = kit.made["p/1"][0]
        generation._starting = next(
            node for node in generation.graph.nodes if node.component is probe
        )
        generation.every(1_000_000, lambda: None)
        (timer,) = generation._timers[id(probe)]
        late = []

        async def stop():
            late.append(timer.cancelled())

        probe.stop = stop
        await generation.stop(10**9)
        return late

    assert asyncio.run(scenario()) == [True]
