"""Guides, specifications and our own code use the terms of the glossary, and no words that only we understood."""

import ast
import io
import re
import tokenize
from functools import cache
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
PRIVATE = {  # further ones, in names only: as words of a sentence they are plain English
    "book": "cache, index, tracker or registry",
    "bill": "cost",
    "board": "registry",
    "lasting": "persistent",
    "account": "cost, or report",
    "bank": "batch of groups",
    "cable": "link",
    "clerk": "handler",
    "desk": "tracker",
    "door": "socket",
    "gate": "intake, or limit",
    "news": "notifications",
    "seat": "place, or entry",
    "standing": "progress",
    "tells": "is_reporting",
    "tied": "child process",
    "most": "MAX_",
    "least": "MIN_",
}
KEPT = {"plugin_told", "last_heard", "standing_s", "_STANDING_S"}  # names that users already read
AVOIDED = (set(INSTEAD) | set(PRIVATE)) - {"most", "least"}
FORBIDDEN = re.compile(rf"\b({'|'.join(INSTEAD)})(s|ed|ing)?\b", re.IGNORECASE)
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)
PAGES = sorted(
    page
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/*.md",
        "docs/alerts/*.md",
        "docs/guides/*.md",
        "docs/specs/*.md",
    )
    for page in ROOT.glob(pattern)
)


SOURCES = sorted((ROOT / "src").rglob("*.py"))


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


def read_prose(source):
    """The docstrings and comments of a module, each on the line where it stands."""
    lines = [""] * (source.count("\n") + 2)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for number, line in enumerate(str(node.value.value).splitlines(), node.lineno):
                lines[number - 1] = line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] += f" {token.string}"
    return "\n".join(lines).replace("``", "`")


@cache
def is_private(name):
    """Whether a name has a word to avoid."""
    parts = re.sub("([a-z])([A-Z])", r"\1_\2", name).lower().strip("_").split("_")
    is_limit = name.isupper() and parts[0] in {"most", "least"}
    return name not in KEPT and (is_limit or not AVOIDED.isdisjoint(parts))


def find_private_names(source):
    """Names of classes, functions, variables and attributes with a word to avoid."""
    for node in ast.walk(ast.parse(source)):
        for field in ("name", "id", "arg", "attr"):
            name = getattr(node, field, None)
            if isinstance(name, str) and is_private(name):
                yield name


def find_in_module(source):
    """What `find_forbidden` and `find_private_names` find; only a module with such letters or words is parsed."""
    is_suspect = re.search("|".join(INSTEAD), source, re.IGNORECASE)
    prose = find_forbidden(read_prose(source)) if is_suspect else []
    is_named = any(map(is_private, set(re.findall(r"\w+", source))))
    return prose, sorted(set(find_private_names(source))) if is_named else []


def test_modules_use_words_that_the_field_uses():
    found = {str(path.relative_to(ROOT)): find_in_module(path.read_text()) for path in SOURCES}
    assert {path: both for path, both in found.items() if any(both)} == {}, INSTEAD | PRIVATE


def test_words_in_a_module_are_found_in_prose_and_in_names():
    source = '"""It was\ntold `heard`."""\nx = "told"  # mended\nclass StackBook: ...\n_MOST_X = n_told = 1\n'
    names = ["StackBook", "_MOST_X", "n_told"]
    assert find_in_module(source) == ([(2, "told"), (3, "mended")], names)


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
