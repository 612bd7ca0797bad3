"""How a real job is chosen, started, disturbed and ended; its script needs no torch here."""

import os
import signal
import sys
from pathlib import Path

import pytest

from ingero.config.torch import find_torch_python
from ingero.errors import ConfigError, IngeroError, UnsupportedError
from ingero.sim.cluster.shares import ProcessorShare
from ingero.sim.cluster.torch_job import JobFile, JobHost, TorchJob, choose_job
from ingero.testing.waiting import wait_until

PRINT = """import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "GLOO_SOCKET_IFNAME")
print(*(os.environ[name] for name in names), *sys.argv[1:])
"""
WAIT = "import signal; signal.pause()\n"
MEET = """import os, signal, socket, time
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(place) as store:
        kept = store.accept()
        signal.pause()
while True:
    try:
        kept = socket.create_connection(place)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
signal.pause()
"""
SHARE = (
    "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True:\n    pass\n"
)


@pytest.fixture
def start_job(tmp_path):
    """Start a job of two ranks on hosts whose cgroups are plain files."""
    jobs = []

    def start(text, *arguments):
        (tmp_path / "job.py").write_text(text)
        hosts = []
        for rank in range(2):
            folder = tmp_path / f"host-{rank}"
            folder.mkdir()
            share = ProcessorShare(folder, True, 0.5)
            hosts.append(JobHost((), "127.0.0.1", "lo", share))
        file = JobFile(Path(sys.executable), tmp_path / "job.py", arguments)
        jobs.append(TorchJob(file, hosts, tmp_path, "one"))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def wait_for_end(job):
    for pid in job.pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_ranks_are_started_as_torchrun_starts_them_once_they_are_released(start_job, tmp_path):
    job = start_job(PRINT, "--steps", "3")
    assert not job.is_over
    job.release()
    wait_for_end(job)
    assert job.is_over
    job.check()
    for rank in range(2):
        said = (tmp_path / f"rank-{rank}.log").read_text()
        assert said == f"{rank} 2 0 127.0.0.1 one lo --steps 3\n"
        assert (tmp_path / f"host-{rank}/cgroup.procs").read_text() == f"{job.pids[rank]}\n"


def test_a_rank_that_fails_is_told_with_its_last_words(start_job):
    job = start_job("import sys; sys.exit('no data')\n")
    job.release()
    wait_for_end(job)
    with pytest.raises(IngeroError, match="rank 0 of the job ended with 1: no data"):
        job.check()


def test_others_may_end_of_a_rank_that_was_killed(start_job):
    job = start_job(WAIT)
    job.release()
    job.kill(1)
    job.kill(0)
    job.check()


def test_a_pulsed_rank_is_stopped_and_goes_on(start_job):
    job = start_job(WAIT)
    job.release()
    job.pulse(1, 0.5)
    for code in (os.CLD_STOPPED, os.CLD_CONTINUED):
        seen = os.waitid(os.P_PID, job.pids[1], os.WSTOPPED | os.WCONTINUED)
        assert seen.si_code == code


def test_a_paused_rank_stands_still(start_job):
    job = start_job(WAIT)
    job.release()
    job.pause(0)
    seen = os.waitid(os.P_PID, job.pids[0], os.WSTOPPED)
    assert seen.si_status == signal.SIGSTOP


def test_waiting_is_by_strangers_as_far_as_the_quota_does_not_explain_it(start_job, tmp_path):
    job = start_job(SHARE)
    job.release()

    def read_waited_ns():
        return int(Path("/proc", str(job.pids[0]), "schedstat").read_text().split()[1])

    wait_until(read_waited_ns)
    waited_ns = read_waited_ns()
    assert job.read_kept_waiting()[0] >= waited_ns
    (tmp_path / "host-0/cpu.stat").write_text("throttled_usec 1000000000\n")
    assert job.read_kept_waiting()[0] == 0
    job.kill(1)
    assert job.read_kept_waiting()[1] == 0


def test_hosts_divide_the_whole_machine_until_the_ranks_have_met(start_job, tmp_path):
    job = start_job(MEET)
    job.release()
    assert (tmp_path / "host-1/cpu.max").read_text() == "10000 10000"
    wait_until(job.divide)
    assert (tmp_path / "host-1/cpu.max").read_text() == "5000 10000"


def test_ranks_that_still_load_keep_the_whole_machine_until_they_are_known_to_have_begun(
    start_job, tmp_path
):
    job = start_job(WAIT)
    job.release()
    assert not job.divide()
    assert (tmp_path / "host-0/cpu.max").read_text() == "10000 10000"
    assert job.divide(has_begun=True)
    assert (tmp_path / "host-0/cpu.max").read_text() == "5000 10000"


def test_a_limit_goes_to_the_host_of_the_rank(start_job, tmp_path):
    start_job(WAIT).limit(1, 0.5)
    assert (tmp_path / "host-1/cpu.max").read_text() == "2500 10000"
    assert not (tmp_path / "host-0/cpu.max").exists()


def test_what_is_not_there_is_refused_with_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no such file"):
        choose_job(str(tmp_path / "gone.py"), (), "")
    script = tmp_path / "job.py"
    script.touch()
    with pytest.raises(ConfigError, match="--python"):
        choose_job(str(script), (), str(tmp_path / "python"))
    for name in ("PATH", "HOME", "INGERO_TORCH_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ingero.sim.cluster.torch_job.find_torch_python", lambda: None)
    with pytest.raises(UnsupportedError, match="no Python here has PyTorch") as refused:
        choose_job(str(script), (), "")
    assert "pip install torch==2.13.0" in refused.value.hint


def test_an_interpreter_without_torch_is_refused(tmp_path):
    script = tmp_path / "job.py"
    script.touch()
    with pytest.raises(ConfigError, match="cannot import torch") as refused:
        choose_job(str(script), (), sys.executable)
    assert "--python" in refused.value.hint


def test_torch_is_found_without_importing_it_which_takes_seconds(tmp_path, monkeypatch):
    script = tmp_path / "job.py"
    script.touch()
    (tmp_path / "torch.py").write_text("raise ImportError('it was imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert choose_job(str(script), (), sys.executable).file == script


def test_an_interpreter_is_found_by_what_lies_beside_it(tmp_path):
    for name in ("plain", "with"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/python3").touch()
    torch = tmp_path / "with/lib/python3.11/site-packages/torch"
    torch.mkdir(parents=True)
    (torch / "version.py").touch()
    path = f"{tmp_path}/plain/bin:{tmp_path}/with/bin"
    found = tmp_path / "with/bin/python3"
    assert find_torch_python({"PATH": path, "HOME": str(tmp_path)}) == found
    assert find_torch_python({"PATH": path, "INGERO_TORCH_PYTHON": "/a/python"}) == Path(
        "/a/python"
    )


@pytest.mark.parametrize("home", ["plain", "of [you]"])
def test_an_interpreter_is_found_in_a_home_of_any_name(tmp_path, monkeypatch, home):
    monkeypatch.chdir(tmp_path)
    environment = tmp_path / home / "venv-torch"
    torch = environment / "lib/python3.11/site-packages/torch"
    torch.mkdir(parents=True)
    (torch / "version.py").touch()
    (environment / "bin").mkdir()
    (environment / "bin/python3").touch()
    found = find_torch_python({"PATH": "", "HOME": str(tmp_path / home)})
    assert found == environment / "bin/python3"
    monkeypatch.chdir(tmp_path / home)
    assert find_torch_python({"PATH": "", "HOME": "/nowhere"}) == found
