"""A class is small, and its name says which one is meant; the allow-lists only shrink."""

from pathlib import Path

import pytest
from tests.conformance.classes import find_classes, find_shared_names, read_sources

MAX_ATTRIBUTES = 12
MAX_METHODS = 20
# Classes that are over today: what they hold now. Lower or delete an entry, never add one.
ATTRIBUTES = {
    "agent/capture/probes/stacks.py:StackBook": 14,
    "agent/collectives/push.py:CollectivePusher": 19,
    "agent/trace/recent.py:Recent": 14,
}
METHODS = {
    "agent/capture/probes/engine.py:Engine": 31,
    "agent/capture/stacks/cfi.py:_Program": 21,
    "agent/collectives/push.py:CollectivePusher": 21,
    "agent/health/loop.py:HealthLoop": 21,
}


@pytest.fixture(scope="module")
def classes():
    return list(find_classes(read_sources(Path(__file__).resolve().parents[2])))


def find_over(classes, count, limit, allowed):
    """Classes over the limit, or over what they are allowed; and entries that they no longer need."""
    now = {f"{one.path}:{one.name}": getattr(one, count) for one in classes}
    over = {name: n for name, n in now.items() if n > allowed.get(name, limit)}
    stale = {name: n for name, n in allowed.items() if not limit < now.get(name, 0) == n}
    return over, stale


def test_no_two_public_classes_share_a_name(classes):
    assert find_shared_names(classes) == {}


def test_no_class_has_more_attributes_than_can_be_kept_in_mind(classes):
    over, stale = find_over(classes, "n_attributes", MAX_ATTRIBUTES, ATTRIBUTES)
    assert not over, f"split these by what they are responsible for: {over}"
    assert not stale, f"lower or delete these entries: {stale}"


def test_no_class_has_more_methods_than_can_be_kept_in_mind(classes):
    over, stale = find_over(classes, "n_methods", MAX_METHODS, METHODS)
    assert not over, f"split these by what they are responsible for: {over}"
    assert not stale, f"lower or delete these entries: {stale}"


def test_the_checks_see_what_they_are_for():
    wide = "class Wide:\n    def __init__(self):\n" + "".join(
        f"        self.a{n} = 0\n" for n in range(13)
    )
    tall = "class Tall:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(21))
    found = list(find_classes({"a.py": wide + tall, "b.py": "class Tall: ...\nclass _Tall: ...\n"}))
    assert find_over(found, "n_attributes", 12, {}) == ({"a.py:Wide": 13}, {})
    assert find_over(found, "n_methods", 20, {}) == ({"a.py:Tall": 21}, {})
    assert find_over(found, "n_methods", 20, {"a.py:Tall": 22})[1] == {"a.py:Tall": 22}
    assert find_shared_names(found) == {"Tall": ["a.py", "b.py"]}
