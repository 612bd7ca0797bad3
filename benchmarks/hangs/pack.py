"""``python -m benchmarks.hangs.pack FOLDER NAME``: packs what `make` made into ``tests/data/hangs/NAME.tar.xz``.

Times of files are kept to the nanosecond or nearly so: a dump's time is its file's.
"""

import sys
import tarfile
from pathlib import Path

PACKED = Path(__file__).parents[2] / "tests" / "data" / "hangs"
SETS = ("dumps", "drawn")
"""Hangs that were thought of, and hangs that were drawn by chance."""


def pack(folder, name):
    """Write every case of a folder, without owners."""
    with tarfile.open(
        PACKED / f"{name}.tar.xz", "w:xz", format=tarfile.PAX_FORMAT, preset=9
    ) as archive:
        for path in sorted(folder.glob("*/*")):
            info = archive.gettarinfo(path, str(path.relative_to(folder)))
            info.mtime = path.stat().st_mtime_ns / 1e9
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mode = 0o644
            with path.open("rb") as stream:
                archive.addfile(info, stream)


def unpack(folder, name):
    """Unpack every case of a set and return its folder by its name."""
    with tarfile.open(PACKED / f"{name}.tar.xz") as archive:
        # Python before 3.11.4, as that of Debian 12, knows no filters; our own archive needs none.
        archive.extractall(
            folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/label.json"))}


if __name__ == "__main__":
    pack(Path(sys.argv[1]), sys.argv[2])
