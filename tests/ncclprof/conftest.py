import os
from pathlib import Path

import pytest
from tests.ncclprof.nccl import Plugin

from ingero.agent.collectives.plugin_ring import find_rings_of


@pytest.fixture
def rings(tmp_path, monkeypatch):
    """Makes the plug-in put its rings into the test's own folder."""
    monkeypatch.setenv("INGERO_NCCL_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def open_ring(rings):
    """Opens this process's ring; closed at the end."""
    found = []

    def open_it():
        (ring,) = find_rings_of(os.getpid(), Path(rings)).values()
        found.append(ring)
        return ring

    yield open_it
    for ring in found:
        ring.close()


@pytest.fixture(params=[4, 5, 6])
def plugin(request):
    return Plugin(request.param)


@pytest.fixture
def join(rings):
    """Makes communicators and ends at the end those that the test did not."""
    made = []

    def join_one(plugin=None, **place):
        one = (plugin or Plugin()).init(**place)
        made.append(one)
        return one

    yield join_one
    for one in made:
        if one.context:
            one.finalize()
