"""Which way of probing is chosen, by what a kernel's type information names."""

import resource

import pytest

from ingero.agent.capture.kernel import features
from ingero.agent.capture.probes.engine import Engine, EngineSettings
from ingero.agent.capture.probes.modes import choose_way
from ingero.config.environment import PROBE_MODE, ProbeMode
from ingero.errors import UnsupportedError

COOKIE, MULTI, SESSION = (
    "BPF_FUNC_get_attach_cookie",
    "BPF_TRACE_UPROBE_MULTI",
    "BPF_TRACE_UPROBE_SESSION",
)
# What sessions of kprobes brought; those of uprobes came three releases later.
KPROBE_SESSION = ["bpf_session_is_return", "BPF_TRACE_KPROBE_SESSION"]
KERNELS = {
    "5.15": [COOKIE],
    "6.6": [COOKIE, MULTI],
    "6.12": [COOKIE, MULTI, *KPROBE_SESSION],
    "6.13": [COOKIE, MULTI, *KPROBE_SESSION, SESSION],
    "7.0": [COOKIE, MULTI, *KPROBE_SESSION, SESSION, "BPF_TRACE_FSESSION"],
}


@pytest.fixture
def pretend(monkeypatch):
    """Run on a kernel whose type information has these names."""

    def begin(names, release="5.10.0-test"):
        text = b"\0".join(name.encode() for name in ("", *names, ""))
        monkeypatch.setattr(features, "_read_names", lambda: text)
        monkeypatch.setattr(features.platform, "release", lambda: release)

    return begin


@pytest.mark.parametrize(
    ("release", "mode"),
    [
        ("5.15", ProbeMode.EVENT),
        ("6.6", ProbeMode.PAIR),
        ("6.12", ProbeMode.PAIR),
        ("6.13", ProbeMode.SESSION),
    ],
)
def test_the_cheapest_way_that_the_kernel_has_is_taken(pretend, release, mode):
    pretend(KERNELS[release])
    assert choose_way(ProbeMode.AUTO).mode is mode


def test_of_session_links_the_programs_for_the_kernel_s_own_function_are_taken(pretend):
    pretend(KERNELS["6.13"])
    assert choose_way(ProbeMode.SESSION).probe == "calls_session"
    pretend(KERNELS["7.0"])
    assert choose_way(ProbeMode.SESSION).probe == "calls_session_ctx"


def test_every_way_of_probing_takes_the_descriptors_that_the_agent_may_have(pretend):
    pretend([])  # too old for any: nothing is loaded
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(soft, hard - 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with pytest.raises(UnsupportedError):
            Engine(EngineSettings(host_probes=()))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.kernel
def test_a_way_that_the_kernel_names_and_does_not_take_costs_only_itself(monkeypatch):
    """Linux 7.0 changed a function that session links need; the same happens here to programs for 7.0."""
    if features.has_name("BPF_TRACE_FSESSION"):
        pytest.skip("this kernel has the function as 7.0 has it")
    monkeypatch.delenv(PROBE_MODE, raising=False)  # the tier may be run in each of the others
    names = features._read_names() + b"BPF_TRACE_FSESSION\0"
    monkeypatch.setattr(features, "_read_names", lambda: names)
    with Engine(EngineSettings(host_probes=())) as engine:
        assert engine.mode is choose_way(ProbeMode.SESSION).mode
        (missing,) = engine.missing
    assert (missing.name, missing.costs) == ("session links", "calls are probed by session links")
    assert "incompatible" in missing.hint


@pytest.mark.parametrize("mode", [ProbeMode.SESSION, ProbeMode.PAIR, ProbeMode.EVENT])
def test_a_newer_kernel_still_has_the_older_ways(pretend, mode):
    pretend(KERNELS["6.13"])
    assert choose_way(mode).mode is mode


def test_a_way_that_the_kernel_lacks_is_refused_with_its_release(pretend):
    pretend(KERNELS["5.15"], "6.1.0-test")
    with pytest.raises(UnsupportedError) as caught:
        choose_way(ProbeMode.SESSION)
    assert caught.value.message == (
        "Linux 6.1.0-test cannot probe calls by session links: that needs Linux 6.13"
    )
    assert "--probe-mode auto" in caught.value.hint


@pytest.mark.parametrize("mode", ProbeMode)
def test_a_kernel_below_the_floor_is_refused_in_one_line_that_names_the_floor(pretend, mode):
    pretend(["BPF_FUNC_ringbuf_output"])
    with pytest.raises(UnsupportedError) as caught:
        choose_way(mode)
    assert caught.value.message == "Linux 5.10.0-test is too old to probe libraries"
    assert caught.value.hint == "use Linux 5.15 or newer"


def test_part_of_a_name_is_not_the_name(pretend):
    pretend([COOKIE, f"{MULTI}_LATER"])
    assert choose_way(ProbeMode.AUTO).mode is ProbeMode.EVENT
