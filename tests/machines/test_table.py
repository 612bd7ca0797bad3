"""The table says of each machine what passed, what did not, and what was never tried."""

import json

import pytest
from scripts.machines.catalog import MACHINES
from scripts.machines.outcomes import Outcome
from scripts.machines.table import README, RESULTS, record, replace_table

PAGE = "before\n<!-- made by `make test-machines RECORD=1` -->\nold\n<!-- end -->\nafter\n"


def outcome(check, *, passed=True, detail=""):
    return Outcome("6.1-x86_64", check, passed, detail)


@pytest.fixture
def files(tmp_path):
    results, readme = tmp_path / "results.json", tmp_path / "README.md"
    readme.write_text(PAGE)
    return results, readme


def row(readme, machine="6.1-x86_64"):
    (line,) = [text for text in readme.read_text().splitlines() if text.startswith(f"| {machine} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_checks_of_a_family_are_counted_and_failures_stand_apart(files):
    seen = [outcome("boot", detail="Linux 6.1.0"), *(outcome(f"counts: {n}") for n in "abc")]
    record([*seen, outcome("up", passed=False)], *files)
    assert row(files[1])[1:4] == ["Linux 6.1.0", "exact counts (3)", "`up`"]
    assert row(files[1], "newest-x86_64")[-1] == "not tried"


def test_a_check_without_a_description_stands_there_by_its_name(files):
    record([outcome("boot", detail="Linux 6.1.0"), outcome("new: a", passed=False)], *files)
    assert row(files[1])[2:4] == ["none", "new"]


def test_a_check_that_is_repeated_replaces_its_earlier_outcome_and_no_other(files):
    record(
        [outcome("boot", detail="Linux 6.1.0"), outcome("check"), outcome("up", passed=False)],
        *files,
    )
    record([outcome("boot", detail="Linux 6.1.0"), outcome("up")], *files)
    assert row(files[1])[2:4] == ["`check`, `up`", "none"]


def test_what_another_kernel_showed_is_forgotten(files):
    record([outcome("boot", detail="Linux 6.1.0"), outcome("check")], *files)
    record([outcome("boot", detail="Linux 6.1.9"), outcome("up")], *files)
    assert row(files[1])[1:3] == ["Linux 6.1.9", "`up`"]


def test_the_readme_has_the_table_of_what_is_kept():
    page = README.read_text("utf-8")
    kept = json.loads(RESULTS.read_text("utf-8"))
    assert replace_table(page, kept) == page
    assert set(kept) <= {machine.name for machine in MACHINES}


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="has no"):
        replace_table("nothing", {})
