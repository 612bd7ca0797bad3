"""Documents point at things that exist."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "deploy/**/*.md",
        "examples/**/*.md",
        "benchmarks/**/*.md",
        "bpf/**/*.md",
    )
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s#]+)(#[^)\s]*)?\)")
CODE_PATH = re.compile(r"`((?:src|tests|docs|deploy|benchmarks|bpf|examples|scripts)/[\w./-]+)`")


def _without_code_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_resolve(path):
    text = _without_code_blocks(path.read_text())
    missing = [
        target
        for target, _ in LINK.findall(text)
        if "://" not in target
        and not target.startswith("mailto:")
        and not (path.parent / target).exists()
    ]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_paths_in_code_marks_exist(path):
    missing = [
        target for target in CODE_PATH.findall(path.read_text()) if not (ROOT / target).exists()
    ]
    assert not missing


def test_specifications_that_modules_name_exist():
    named = {
        (path.relative_to(ROOT).as_posix(), target)
        for path in ROOT.glob("src/**/*.py")
        for target in re.findall(r"docs/specs/[\w-]+\.md", path.read_text())
    }
    assert len(named) > 10
    assert {(path, target) for path, target in named if not (ROOT / target).exists()} == set()


def test_no_committed_text_names_a_package_registry():
    pinned = (ROOT / "requirements" / "dev.txt").read_text()
    assert "://" not in pinned


def test_no_two_decisions_share_a_number():
    numbers = Counter(path.name[:4] for path in (ROOT / "docs/decisions").glob("0*.md"))
    assert [number for number, n in numbers.items() if n > 1] == []


def test_the_readme_leads_to_every_guide():
    linked = {target for target, _ in LINK.findall((ROOT / "README.md").read_text())}
    guides = {f"docs/guides/{path.name}" for path in (ROOT / "docs/guides").glob("*.md")}
    assert guides - linked == set()
