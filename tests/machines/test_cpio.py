"""What the kernel unpacks is what went in; read back by Debian's own cpio."""

import io
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from scripts.machines.cpio import Archive, merge_usr


def read_entries(data):
    """Name, mode, contents and device of every entry, by the format's description."""
    entries, at = [], 0
    while at < len(data):
        assert data[at : at + 6] == b"070701"
        numbers = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        n_name, size = numbers[11], numbers[6]
        name = data[at + 110 : at + 109 + n_name].decode()
        start = (at + 110 + n_name + 3) // 4 * 4
        entries.append((name, numbers[1], data[start : start + size], tuple(numbers[9:11])))
        at = (start + size + 3) // 4 * 4
    return entries


def write(fill):
    stream = io.BytesIO()
    archive = Archive(stream)
    fill(archive)
    archive.close()
    return stream.getvalue()


def test_bytecode_lies_where_python_looks_and_is_taken_without_its_source(tmp_path):
    tag = sys.implementation.cache_tag
    archive = Archive(stream := io.BytesIO(), tag)
    archive.add_file("a/one.py", b"NUMBER = 7")
    archive.add_file("a/broken.py", b"1 +")
    archive.close()
    found = {name: data for name, _, data, _ in read_entries(stream.getvalue())}
    assert [name for name in found if name.endswith(".pyc")] == [f"a/__pycache__/one.{tag}.pyc"]
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "one.py").write_text("NUMBER = 8")
    Path(tmp_path, "__pycache__", f"one.{tag}.pyc").write_bytes(
        found[f"a/__pycache__/one.{tag}.pyc"]
    )
    command = (sys.executable, "-c", "import one; print(one.NUMBER)")
    assert subprocess.check_output(command, cwd=tmp_path, text=True) == "7\n"


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        ("./bin/sh", "usr/bin/sh"),
        ("/lib/aarch64-linux-gnu/libc.so.6", "usr/lib/aarch64-linux-gnu/libc.so.6"),
        ("usr/bin/env", "usr/bin/env"),
        ("./lib", "lib"),
        ("library/x", "library/x"),
    ],
)
def test_what_a_package_puts_at_the_top_lands_below_usr(given, merged):
    assert merge_usr(given) == merged


def test_files_links_and_devices_are_written_with_the_folders_above_them_once():
    def fill(archive):
        archive.add_file("a/b/one", b"12345", 0o755)
        archive.add_file("a/b/two", b"")
        archive.add_link("a/three", "b/one")
        archive.add_console()

    entries = read_entries(write(fill))
    assert [(name, stat.S_IFMT(mode)) for name, mode, _, _ in entries] == [
        ("a", stat.S_IFDIR),
        ("a/b", stat.S_IFDIR),
        ("a/b/one", stat.S_IFREG),
        ("a/b/two", stat.S_IFREG),
        ("a/three", stat.S_IFLNK),
        ("dev", stat.S_IFDIR),
        ("dev/console", stat.S_IFCHR),
        ("TRAILER!!!", 0),
    ]
    assert entries[2][1:3] == (stat.S_IFREG | 0o755, b"12345")
    assert entries[4][2] == b"b/one"
    assert entries[6][3] == (5, 1)


def test_a_package_s_files_links_and_second_names_are_taken_but_for_unwanted_ones():
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as package:
        for name, kind, link in (
            ("./bin/tool", tarfile.REGTYPE, ""),
            ("./bin/again", tarfile.LNKTYPE, "./bin/tool"),
            ("./usr/share/doc/tool", tarfile.REGTYPE, ""),
            ("./usr/bin/short", tarfile.SYMTYPE, "tool"),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.mode = kind, link, 0o755
            entry.size = 3 if kind == tarfile.REGTYPE else 0
            package.addfile(entry, io.BytesIO(b"abc"))
    packed.seek(0)
    entries = read_entries(
        write(lambda one: one.add_package(packed, lambda name: "/doc/" not in name))
    )
    found = {name: (stat.S_IFMT(mode), contents) for name, mode, contents, _ in entries}
    assert found["usr/bin/tool"] == (stat.S_IFREG, b"abc")
    assert found["usr/bin/again"] == (stat.S_IFREG, b"abc")
    assert found["usr/bin/short"] == (stat.S_IFLNK, b"tool")
    assert "usr/share/doc/tool" not in found


@pytest.mark.skipif(shutil.which("cpio") is None, reason="needs the program cpio")
def test_the_program_cpio_lists_the_same(tmp_path):
    data = write(lambda archive: archive.add_file("folder/file", b"x" * 4097))
    listed = subprocess.run(["cpio", "-t", "--quiet"], input=data, capture_output=True, check=True)
    assert listed.stdout.decode().split() == ["folder", "folder/file"]
