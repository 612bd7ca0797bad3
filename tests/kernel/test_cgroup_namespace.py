"""An agent in a cgroup namespace of its own, as a container gives it: what it finds of another cgroup's process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingero.agent.capture.discover.cgroups import Cgroups

pytestmark = pytest.mark.kernel

# As runc makes a container: its own cgroup hides the host's, which may be mounted in a folder besides.
CONTAINER = '''echo $$ >"$1/cgroup.procs" && exec unshare --cgroup --mount sh -c '
    { [ -z "$3" ] || mount --bind "$2" "$3"; } && mount --bind "$1" "$2" && shift 3 && exec "$@"' sh "$@"'''
# A process of another container, on a machine whose first process is ours to look into.
MACHINE = 'tail -f /dev/null & echo $! >"$1/cgroup.procs" && shift && sh -c "$@" $!'
LOOK = """
import json, sys
from pathlib import Path
from ingero.agent.capture.discover.cgroups import Cgroups
from ingero.agent.diagnosis.counters import CounterFiles
cgroups, (path, pid) = Cgroups(), sys.argv[1:]
pid = int(pid)
limits = [one.n_processors for one in CounterFiles(cgroups=cgroups).read(pid, 0).quotas]
print(json.dumps({
    "shown": Path(f"/proc/{pid}/cgroup").read_text(),
    "paths": [one.path for one in cgroups.read(pid)],
    "n_processors": min(limits, default=None),
    "id": cgroups.find_id(path),
    "own": [(one.shown, one.path) for one in cgroups.read("self")],
}))
"""


@pytest.fixture
def groups():
    """Cgroups of two containers in one pod's, with limits; removed at the end."""
    found = Cgroups(Path("/proc")).find_folders(os.getpid(), "cpu")
    if not found:
        pytest.skip("no cgroup with the processors is mounted")
    top = found[-1]
    is_v1 = not (top / "cgroup.controllers").exists()
    pods = top / f"ingero-test-{os.getpid()}"
    folders = [pods, pods / "podA", pods / "podA/agent", pods / "podB", pods / "podB/train"]
    made = []
    try:
        for folder in folders:
            folder.mkdir()
            made.append(folder)
            if not is_v1 and folder not in (folders[2], folders[4]):
                (folder / "cgroup.subtree_control").write_text("+cpu")
        for folder, quota in ((folders[2], 30_000), (folders[4], 70_000)):
            if is_v1:
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (folder / "cpu.max").write_text(f"{quota} 100000")
    except OSError as error:
        for folder in reversed(made):
            folder.rmdir()
        pytest.skip(f"no cgroup can be limited here: {error}")
    yield top, is_v1, folders[2], folders[4]
    for folder in reversed(made):
        folder.rmdir()


@pytest.mark.parametrize("is_mounted", [True, False], ids=["host's folder", "first process"])
def test_the_limit_and_the_path_of_a_process_in_another_container_are_found(
    groups, is_mounted, tmp_path
):
    top, is_v1, agent, train = groups
    place = str(tmp_path) if is_mounted else ""
    path = f"/{train.relative_to(top)}"
    machine = "unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", MACHINE, "sh", str(train)
    container = CONTAINER, "sh", str(agent), str(top), place, sys.executable, "-c", LOOK, path
    done = subprocess.run([*machine, *container], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert ":/../../podB/train\n" in seen["shown"]  # so does the kernel
    assert path in seen["paths"]
    assert seen["n_processors"] == 0.7
    assert seen["id"] == (0 if is_v1 else train.stat().st_ino)
    assert ["/", f"/{agent.relative_to(top)}"] in seen["own"]
