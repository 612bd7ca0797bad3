"""A class is small, and its name says which one is meant."""

from pathlib import Path

import pytest
from tests.conformance.classes import find_classes, find_shared_names, read_sources

MAX_ATTRIBUTES = 12
MAX_METHODS = 20


@pytest.fixture(scope="module")
def classes():
    return list(find_classes(read_sources(Path(__file__).resolve().parents[2])))


def find_over(classes, count, limit):
    """Classes over a limit, and what they hold."""
    return {f"{one.path}:{one.name}": n for one in classes if (n := getattr(one, count)) > limit}


def test_no_two_public_classes_share_a_name(classes):
    assert find_shared_names(classes) == {}


@pytest.mark.parametrize(
    ("count", "limit"), [("n_attributes", MAX_ATTRIBUTES), ("n_methods", MAX_METHODS)]
)
def test_no_class_has_more_than_can_be_kept_in_mind(classes, count, limit):
    over = find_over(classes, count, limit)
    assert not over, f"split these by what they are responsible for: {over}"


def test_the_checks_see_what_they_are_for():
    wide = "class Wide:\n    def __init__(self):\n" + "".join(
        f"        self.a{n} = 0\n" for n in range(13)
    )
    tall = "class Tall:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(21))
    found = list(find_classes({"a.py": wide + tall, "b.py": "class Tall: ...\nclass _Tall: ...\n"}))
    assert find_over(found, "n_attributes", 12) == {"a.py:Wide": 13}
    assert find_over(found, "n_methods", 20) == {"a.py:Tall": 21}
    assert find_shared_names(found) == {"Tall": ["a.py", "b.py"]}
