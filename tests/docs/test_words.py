"""Guides and specifications use the terms of the glossary, and none of the words that only we understood."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTEAD = {
    "told": "sent, shown, reported, or distinguished",
    "heard": "received, or pushed",
    "whoever": "the user, the caller, or whichever",
    "oftener": "more often",
    "mend": "repair, or correct",
    "for good": "permanently",
    "siblings": "stages of one replica, peers, or rotated files",
    "surroundings": "machine and devices",
    "narrate": "print",
    "weather": "network faults",
    "purse": "wealth",
    "stake": "wealth",
    "nursery": "pool of processes",
    "janitor": "cleanup process",
    "lane": "queue",
}
FORBIDDEN = re.compile(rf"\b({'|'.join(INSTEAD)})(s|ed|ing)?\b", re.IGNORECASE)
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)
PAGES = sorted(
    page
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/*.md",
        "docs/guides/*.md",
        "docs/specs/*.md",
    )
    for page in ROOT.glob(pattern)
)


def find_forbidden(text):
    """Lines of prose with a word to avoid: (line, word)."""
    prose = CODE.sub(lambda found: "\n" * found[0].count("\n"), text)
    return [
        (number, found[0])
        for number, line in enumerate(prose.splitlines(), 1)
        for found in FORBIDDEN.finditer(line)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_uses_words_that_the_field_uses(page):
    found = find_forbidden(page.read_text())
    assert not found, [(line, word, INSTEAD.get(word.lower(), "")) for line, word in found]


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("docs/decisions/0*.md")), ids=lambda page: page.name
)
def test_the_title_of_a_decision_does_too(page):
    assert not find_forbidden(page.read_text().partition("\n")[0] + page.stem.replace("-", " "))


def test_terms_are_in_order_and_each_is_explained_once():
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE
    )[1:]
    terms = [term for term, _ in rows]
    assert len(terms) > 40
    assert terms == sorted(set(terms), key=str.lower)


def test_words_in_code_and_links_are_left_alone_and_others_are_found():
    text = "`told` [why](told.md)\n```\ntold\n```\nIt mended\nthe lane."
    assert find_forbidden(text) == [(5, "mended"), (6, "lane")]
