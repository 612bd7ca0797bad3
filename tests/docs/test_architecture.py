"""Every package is named in the page that says what is where, and every file that the page names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src/ingero"
PAGE = (ROOT / "docs/architecture.md").read_text()


def test_every_package_is_in_the_table():
    packages = {
        path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")
    }
    missing = {name for name in packages - {"."} if f"`{name}/`" not in PAGE}
    assert not missing, f"name these in docs/architecture.md: {sorted(missing)}"


def test_every_file_and_package_that_the_page_names_is_there():
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", PAGE)
    first_of_a_list = {"grpc.py", "logs.py", "spans.py"}  # of the folder named just before
    gone = {name for name in set(named) - first_of_a_list if not (PACKAGE / name).exists()}
    assert len(named) > 60
    assert not gone
