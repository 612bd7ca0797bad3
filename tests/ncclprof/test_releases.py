"""Releases are chosen by name and pattern, and every one has its row in the table."""

import pytest
from scripts.libraries import NCCL, choose_releases, find_fetched
from tests.ncclprof.releases import QUICK, read_table


def test_releases_are_chosen_by_names_and_patterns_in_their_order():
    assert choose_releases("") == NCCL
    assert choose_releases("2.28.*, 2.18.1") == ("2.18.1", "2.28.3", "2.28.7", "2.28.9")
    with pytest.raises(ValueError, match=r"no release of NCCL is '3\.\*'; one of: 2\.18\.1, "):
        choose_releases("2.18.1,3.*")


def test_the_table_has_every_release():
    assert tuple(read_table()) == NCCL
    assert set(QUICK) <= set(NCCL)


def test_what_was_not_fetched_is_not_found(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_fetched("nvidia-nccl-cu12", "2.18.1", "libnccl.so.2") is None
    folder = tmp_path / "ingero/libraries/nvidia-nccl-cu12-2.18.1"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2").touch()
    assert find_fetched("nvidia-nccl-cu12", "2.18.1", "libnccl.so.2") == folder / "libnccl.so.2"
