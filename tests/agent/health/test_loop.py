from itertools import pairwise

import pytest

HEALTHY = {"for": "100h"}


def modes(samples):
    """The modes in order, without repetitions."""
    trail = []
    for sample in samples:
        if not trail or trail[-1] != sample.applied.mode.value:
            trail.append(sample.applied.mode.value)
    return trail


def test_a_stub_agent_pushes_what_the_existing_one_does(make_rig):
    rig = make_rig([HEALTHY], sample_s=10, warmup=30)
    rig.samples(310)
    pushes = rig.pushes()
    assert [push.health_score for push in pushes[:3]] == pytest.approx([0.27, 0.94, 0.94])
    assert [push.state for push in pushes] == ["calibrating"] * 29 + ["active"] * 2
    assert rig.collector.requests[0].path == "/v1/metrics?cluster_id=prod+a"
    assert rig.collector.requests[0].headers["content-type"] == "application/json"


def test_the_first_push_comes_after_one_interval(make_rig):
    rig = make_rig([HEALTHY])
    assert not any(sample.is_pushed for sample in rig.samples(9))
    assert rig.sample().is_pushed


def test_fleet_goes_away_and_comes_back_and_every_rung_is_taken(make_rig):
    rig = make_rig([HEALTHY])
    rig.collector.set_threshold("0.9")
    assert modes(rig.samples(60)) == ["none", "fleet"]
    rig.collector.stop()
    assert modes(rig.samples(400)) == ["fleet", "fleet-cached", "local-cached", "local-baseline"]
    rig.collector.start()
    assert modes(rig.samples(20)) == ["local-baseline", "fleet"]
    rig.collector.set_threshold("0.9", "false")
    assert modes(rig.samples(20))[-1] == "fleet-cached"
    assert rig.cache.is_reachable


def test_a_restarted_fleet_without_a_threshold_leaves_the_last_one_as_cached(make_rig):
    rig = make_rig([HEALTHY])
    rig.collector.set_threshold("0.9")
    rig.samples(60)
    rig.collector.set_threshold(None)
    assert modes(rig.samples(400)) == ["fleet", "fleet-cached", "none"]


def test_a_slow_node_is_one_episode_with_one_id_everywhere(make_rig):
    rig = make_rig([{"for": "60s"}, {"for": "40s", "throughput": 30}, HEALTHY])
    rig.collector.set_threshold("0.9")
    rig.samples(160)
    events = rig.events()
    assert {event.event_id for event in events} == {"episode-1"}
    assert [event.straggler_event for event in events] == [1] * (len(events) - 1) + [0]
    assert len(events) == 6  # at once, four ticks, and the end
    attributes = events[0].event_attributes
    assert attributes["dominant_signal"] == "throughput"
    assert attributes["threshold"] == 0.9
    assert attributes["score"] == pytest.approx(0.495)
    lines = [type(message).__name__ for message in rig.stream.seen]
    assert lines == ["StragglerState"] * 5 + ["StragglerResolved"]
    assert {message.event_id for message in rig.stream.seen} == {"episode-1"}
    assert (rig.stream.seen[0].rank, rig.stream.seen[0].world_size) == (3, 8)


def test_a_fall_is_pushed_within_a_second_at_an_unchanged_interval(make_rig):
    rig = make_rig([{"for": "63s"}, {"for": "40s", "throughput": 30}])
    rig.collector.set_threshold("0.9")
    rig.samples(63)
    n_before = len(rig.events())
    sample = rig.sample()
    assert sample.is_early
    assert sample.is_straggler
    assert len(rig.events()) == n_before + 1
    assert rig.sample().is_pushed is False, "nothing moved since"


def test_a_score_that_moves_is_pushed_at_once_also_when_nothing_can_be_judged(make_rig):
    rig = make_rig([
        {"for": "63s"},
        {"for": "4s", "throughput": 95},
        {"for": "1h", "throughput": 80},
    ])
    rig.samples(63)
    samples = rig.samples(6)
    assert [sample.is_early for sample in samples] == [False] * 4 + [True, False]
    assert rig.pushes()[-1].health_score == pytest.approx(0.86)


def test_early_pushes_are_a_second_apart(make_rig):
    wild = [{"for": "100ms"}, {"for": "100ms", "throughput": 30}]
    rig = make_rig([{"for": "1s"}, *wild], sample_s=0.1, script={"then": "repeat"})
    samples = rig.samples(120)
    early = [sample.wall_ns for sample in samples if sample.is_early]
    assert len(early) > 20
    gaps = [(after - before) / 1e9 for before, after in pairwise(early)]
    assert min(gaps) >= 1


def test_two_bad_looks_are_needed_when_confirmation_is_asked_for(make_rig):
    steps = [{"for": "63s"}, {"for": "1s", "throughput": 30}, {"for": "5s"}]
    rig = make_rig([*steps, {"for": "9s", "throughput": 30}], confirm=2)
    rig.collector.set_threshold("0.9")
    samples = rig.samples(75)[60:]
    is_low = [sample.score < 0.9 for sample in samples]
    assert is_low.count(True) == 7, "one alone, and six at the end"
    assert not is_low[is_low.index(True) + 1]
    found = [sample.is_straggler for sample in samples]
    assert found == [
        low and was_low for low, was_low in zip(is_low, [False, *is_low], strict=False)
    ]


def test_a_permanent_slowdown_never_becomes_normal(make_rig):
    rig = make_rig([{"for": "300s"}, {"for": "100h", "throughput": 70}])
    rig.collector.set_threshold("0.9")
    rig.samples(300)
    late = rig.samples(3600)
    assert all(sample.is_straggler for sample in late[5:])
    assert late[-1].score == pytest.approx(late[5].score)
    assert rig.episodes.n_opened == 1


def test_a_failed_read_pushes_nothing_and_accuses_nobody(make_rig):
    rig = make_rig([{"for": "60s"}, {"for": "15s", "read": "fail"}, HEALTHY])
    rig.collector.set_threshold("0.9")
    rig.samples(60)
    n_before = len(rig.pushes())
    failed = rig.samples(14)
    assert [sample.score for sample in failed if not sample.is_tick] == [None] * 13
    assert len(rig.pushes()) <= n_before + 1, "the tick may still push what the interval had"
    rig.samples(60)
    assert min(push.health_score for push in rig.pushes()[2:]) == pytest.approx(0.94)
    assert rig.events() == []
    assert rig.loop.baseline.fast.throughput == pytest.approx(100)


def test_a_stale_node_is_silent_and_calibrates_when_it_can_be_read_again(make_rig):
    rig = make_rig([{"for": "60s"}, {"for": "100s", "read": "fail"}, HEALTHY])
    rig.samples(60)
    states = [sample.state.value for sample in rig.samples(99)]
    assert states[-1] == "stale"
    n_before = len(rig.pushes())
    woken = rig.samples(3)
    assert woken[-1].state == "calibrating"
    assert rig.loop.baseline.n_samples == 1
    assert {push.state for push in rig.pushes()[n_before:]} <= {"calibrating"}


def test_a_hang_is_a_straggler_for_as_long_as_it_lasts(make_rig):
    rig = make_rig([{"for": "60s"}, {"for": "600s", "stall": True}, HEALTHY])
    rig.collector.set_threshold("0.9")
    rig.samples(61)
    hung = rig.samples(599)
    assert {sample.state.value for sample in hung[1:]} == {"active"}
    assert all(sample.is_straggler for sample in hung[1:])
    after = rig.samples(30)
    assert not after[-1].is_straggler
    assert [event.straggler_event for event in rig.events()].count(0) == 1


def test_a_node_whose_work_is_gone_is_flagged_and_then_idle_and_its_episode_closes(make_rig):
    rig = make_rig([{"for": "60s"}, {"for": "100s", "throughput": 0, "compute": 0.0}])
    rig.collector.set_threshold("0.9")
    rig.samples(61)
    gone = rig.samples(2)
    assert gone[-1].is_straggler
    later = rig.samples(60)
    assert later[-1].state == "idle"
    assert not later[-1].is_straggler
    assert rig.pushes()[-1].state == "idle"
    assert [event.straggler_event for event in rig.events()][-1] == 0
    assert type(rig.stream.seen[-1]).__name__ == "StragglerResolved"


def test_idleness_is_not_learned_and_waking_starts_afresh(make_rig):
    rig = make_rig([{"for": "60s"}, {"for": "100s", "throughput": 0}, HEALTHY])
    rig.samples(155)
    samples = rig.samples(20)
    states = [sample.state.value for sample in samples]
    assert "idle" in states
    assert states[-1] == "calibrating"
    assert rig.loop.baseline.fast.throughput == pytest.approx(100)


def test_another_workload_is_measured_against_itself(make_rig):
    rig = make_rig([
        {"for": "60s", "workload": "a"},
        {"for": "100h", "workload": "b", "throughput": 20},
    ])
    rig.collector.set_threshold("0.9")
    rig.samples(200)
    assert rig.events() == []
    assert rig.loop.baseline.fast.throughput == pytest.approx(20)


def test_silence_that_fleet_asks_for_is_kept_and_bounded(make_rig):
    rig = make_rig([{"for": "60s"}, {"for": "100h", "throughput": 30}])
    rig.collector.set_threshold("0.9")
    rig.samples(55)
    rig.collector.status = 503
    rig.collector.headers["Retry-After"] = "86400"
    rig.samples(5)
    n_before = len(rig.collector.requests)
    quiet = rig.samples(29)
    assert len(rig.collector.requests) == n_before
    assert any(sample.is_straggler for sample in quiet), "judging goes on"
    rig.collector.status = 200
    rig.samples(12)
    assert len(rig.collector.requests) > n_before
    assert rig.events()[-1].straggler_event == 1, "what was owed is told"


def test_detections_are_traced_as_one_span_per_episode(make_rig):
    rig = make_rig([{"for": "60s"}, {"for": "40s", "throughput": 30}, HEALTHY])
    rig.collector.set_threshold("0.9")
    rig.samples(160)
    spans = [
        span
        for export in rig.spans
        for entry in export.tree.resource_spans
        for scope in entry.scope_spans
        for span in scope.spans
    ]
    assert [span.name for span in spans] == ["ingero.detection.straggler"]
    lasted_s = (spans[0].end_time_unix_nano - spans[0].start_time_unix_nano) / 1e9
    assert lasted_s == pytest.approx(40, abs=1)
    assert spans[0].events[0].attributes[0].value.string_value == "resolved"


def test_an_interrupted_episode_still_has_its_span(make_rig):
    rig = make_rig([{"for": "60s"}, {"for": "100h", "throughput": 30}])
    rig.collector.set_threshold("0.9")
    rig.samples(70)
    assert rig.spans == []
    rig.loop.finish()
    assert len(rig.spans) == 1


def test_a_clock_step_changes_nothing_but_the_stamps(make_rig):
    rig = make_rig([HEALTHY])
    rig.collector.set_threshold("0.9")
    rig.samples(60)
    rig.clock.step_wall(-3_600_000_000_000)
    before = rig.samples(30)
    rig.clock.step_wall(7_200_000_000_000)
    after = rig.samples(30)
    assert modes(before + after) == ["fleet"]
    assert rig.events() == []


def test_equal_agents_are_never_stragglers_whatever_their_noise_floor(make_rig):
    rig = make_rig([{"for": "100h", "noise": 0.01}])
    rig.collector.set_threshold("0.85")
    assert not any(sample.is_straggler for sample in rig.samples(1200))


@pytest.mark.parametrize("bad", ["0", "1.0", "NaN", "abc"])
def test_a_rejected_threshold_neither_counts_nor_stops_the_fallback(make_rig, bad):
    rig = make_rig([HEALTHY])
    rig.collector.set_threshold(bad)
    assert modes(rig.samples(60)) == ["none"]
    assert not rig.cache.is_piggybacked
    assert rig.cache.counts.n_rejected > 0


FALL = [{"for": "63s"}, {"for": "1h", "throughput": 30}]


def test_a_node_under_fleets_bar_waits_for_its_peers_and_asks_once_more(make_rig):
    rig = make_rig(FALL, peers_wait_ns=10_000_000_000)
    rig.collector.set_threshold("0.9")
    samples = rig.samples(90)
    first = next(index for index, sample in enumerate(samples) if sample.is_straggler)
    fell = next(
        index
        for index, sample in enumerate(samples)
        if sample.score and sample.score < 0.9 and index > 40
    )
    assert samples[fell].is_early, "Fleet hears of the fall at once"
    assert 10 <= first - fell <= 12
    assert [rig.episodes.n_opened, rig.episodes.n_closed] == [1, 0]


def test_a_node_whose_peers_fell_too_is_no_straggler_while_fleet_says_so(make_rig):
    rig = make_rig(
        [*FALL[:1], {"for": "60s", "throughput": 30}, HEALTHY], peers_wait_ns=10_000_000_000
    )
    rig.collector.set_threshold("0.9")
    rig.samples(66)
    rig.collector.set_panic()
    samples = rig.samples(50)
    assert not any(sample.is_straggler for sample in samples)
    assert modes(samples)[-1] == "none"
    assert samples[-1].score < 0.6
    rig.collector.stop()  # neither an older bar nor the node's own counts now
    samples = rig.samples(60)
    assert modes(samples) == ["none"]
    assert not any(sample.is_straggler for sample in samples)
    rig.collector.start()
    rig.collector.set_threshold("0.9")
    samples = rig.samples(30)
    assert modes(samples)[-1] == "fleet"
    assert rig.episodes.n_opened == 0


def test_a_straggler_stays_one_through_a_panic_that_began_later(make_rig):
    rig = make_rig(FALL)
    rig.collector.set_threshold("0.9")
    rig.samples(70)
    assert rig.episodes.n_opened == 1
    rig.collector.set_panic()
    assert all(sample.is_straggler for sample in rig.samples(30))
    assert [rig.episodes.n_opened, rig.episodes.n_closed] == [1, 0]


def test_without_fleet_a_node_does_not_wait_to_be_judged_by_its_own_bar(make_rig):
    rig = make_rig([{"for": "450s"}, {"for": "1h", "throughput": 10}], peers_wait_ns=10_000_000_000)
    rig.collector.set_threshold("0.9")
    rig.samples(60)
    rig.collector.stop()
    rig.samples(390)
    samples = rig.samples(3)
    assert modes(samples) == ["local-baseline"]
    assert samples[-1].is_straggler
