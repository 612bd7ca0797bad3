"""Each metric and each alert has a page that says what it means when it rises, and what to do."""

import re

import pytest
from scripts.metric_pages import (
    FOLDER,
    PROGRAMS,
    build_page,
    find_alerts,
    find_entries,
    read_declared,
    read_written,
)

from ingero.fleet.processors.collectives.config import NcclConfig
from ingero.fleet.processors.collectives.pages import CollectivesPages
from ingero.fleet.processors.collectives.state import CollectivesState
from ingero.testing.host import ManualHost

every_program = pytest.mark.parametrize("program", PROGRAMS)


@every_program
def test_each_metric_has_one_text_and_no_text_is_about_one_that_is_gone(program):
    written, declared = read_written(program), read_declared(program)
    assert len(declared) > 5
    assert {
        name: find_entries(name, written)
        for name in declared
        if len(find_entries(name, written)) != 1
    } == {}
    assert {
        key for key in written if not any(key in find_entries(name, written) for name in declared)
    } == set()


@every_program
def test_each_text_says_something_in_sentences(program):
    for key, texts in read_written(program).items():
        rises, todo = texts
        assert len(rises) > 15, key
        assert rises.endswith("."), key
        assert todo.endswith("."), key


@every_program
def test_the_page_is_the_one_that_make_docs_writes(program):
    assert (FOLDER / f"{program}.md").read_text() == build_page(program)


def test_the_admin_pages_that_texts_name_are_served():
    texts = "".join(text for both in read_written("fleet").values() for text in both)
    named = set(re.findall(r"admin page \(`(\w+)`\)", texts))
    host = ManualHost()
    pages = CollectivesPages(CollectivesState(NcclConfig(), host), host)
    served = {route.path.rsplit("/", 1)[1] for route in pages.admin_routes()}
    assert named
    assert named <= served


def test_alerts_are_linked_from_the_metrics_that_they_ask_for():
    pages = "".join(build_page(program) for program in PROGRAMS)
    linked = {alert for alert in find_alerts() if f"[{alert}](../alerts/{alert}.md)" in pages}
    assert {
        "IngeroJobHangs",
        "IngeroFleetLosesData",
        "IngeroEchoSlow",
        "IngeroFleetQueueFills",
    } <= linked
