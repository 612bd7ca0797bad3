"""Maps as Linux before 6.1 gets them: there a probe that allocates an entry may come in the middle of the allocator."""

import re
from pathlib import Path

import pytest

from ingero.agent.capture.kernel import features
from ingero.agent.capture.probes.engine import Engine, EngineSettings

pytestmark = pytest.mark.kernel


def read_maps(engine):
    """Type, flags and most entries of every map of an engine, by name."""
    found = {}
    for loaded in engine._objects:
        for name, one in loaded.maps.items():
            text = Path(f"/proc/self/fdinfo/{one.fd}").read_text()
            fields = ("map_type", "map_flags", "max_entries")
            found[name] = tuple(
                int(re.search(rf"^{field}:\s+(\w+)$", text, re.MULTILINE)[1], 0) for field in fields
            )
    return found


@pytest.mark.parametrize("allocates", [True, False])
def test_hashes_have_all_their_entries_from_the_start_on_a_kernel_without_an_allocator_for_them(
    monkeypatch, allocates
):
    if not allocates:
        names = features._read_names().replace(b"\0bpf_mem_alloc\0", b"\0\0")
        monkeypatch.setattr(features, "_read_names", lambda: names)
    with Engine(EngineSettings()) as engine:
        engine.control.watch_pid(1)
        engine.start_host_probes()
        assert engine.missing == []
        maps = read_maps(engine)
    assert maps["threads"] == ((1, 1, 65536) if allocates else (1, 0, 16384))
    assert maps["allocations"] == (1, int(allocates), 262144)
    assert maps["departures"] == (1, int(allocates), 65536)
    assert maps["faulting"] == (29, 1, 0)
    assert maps["owners"] == (24, 1, 0)
