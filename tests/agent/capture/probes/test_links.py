"""What becomes of probes when nobody waits for their removal."""

import os
from pathlib import Path

import pytest

from ingero.agent.capture.probes.links import leave_links


def _read_children() -> str:
    return Path("/proc/thread-self/children").read_text(encoding="ascii")


def test_links_that_are_left_are_closed_here_at_once_and_in_the_end_everywhere():
    reader, *links = os.pipe()
    links.append(os.dup(links[0]))
    held = tuple(links)
    children = _read_children()
    leave_links(links)
    assert _read_children() == children  # there is none to reap, now or later
    assert links == []
    for fd in held:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert os.read(reader, 1) == b""  # the last holder is gone
    os.close(reader)


def test_without_links_nothing_is_started():
    before = _read_children()
    leave_links([])
    assert _read_children() == before
