"""The names of Fleet's log records and of their attributes stand in one wire module each."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
ROOT = TOP / "src" / "ingero"
OWNERS = {
    "ingero.verdict": "wire/verdicts.py",
    "ingero.cost": "wire/costs.py",
    "ingero.episode": "wire/episodes.py",
    "ingero.hang": "wire/hangs.py",
}


def _literals(path):
    """Every text of a module, those between the braces of an f-string included."""
    tree = ast.parse(path.read_text())
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


@functools.cache
def _places():
    places = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for text in _literals(path):
            for event in OWNERS:
                if text.startswith(event):
                    places[event, text].append(name)
    return places


def test_each_name_stands_once_and_in_the_module_that_owns_it():
    wrong = {text: found for (event, text), found in _places().items() if found != [OWNERS[event]]}
    assert not wrong, f"import these from their wire module: {wrong}"


def test_each_module_that_owns_an_event_spells_its_name():
    spelled = {text for _, text in _places()}
    assert set(OWNERS) <= spelled


def test_the_specification_of_an_event_names_all_of_its_attributes():
    missing = []
    for event, text in _places():
        description = (TOP / "docs" / "specs" / f"{event.rpartition('.')[2]}.md").read_text()
        missing += [] if f"`{text}`" in description else [text]
    assert not missing
