"""A file whose pages are on a disk and not in memory."""

import mmap
import os

import pytest


def write_uncached(path, n_pages):
    """Write so many pages; a test that needs a disk is skipped where there is none."""
    if os.major(path.parent.stat().st_dev) == 0:
        pytest.skip("the temporary folder is not on a block device")
    with path.open("wb") as file:
        file.write(os.urandom(n_pages * mmap.PAGESIZE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
