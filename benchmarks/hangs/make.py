"""``PYTHON -m benchmarks.hangs.make FOLDER [CASE …]``: makes every hang of `cases` with PyTorch itself and keeps what its ranks write.

``seed_N`` as a case is the job that `drawn` draws with that seed. PYTHON is an interpreter that has torch; nothing of ours is needed. For each case a folder: ``dump_R`` and ``dump_R.txt`` of each rank
that could still answer, as `examples/flight_recorder/dump_on_signal.py` writes them, and ``label.json``.
"""

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.hangs.cases import CASES
from benchmarks.hangs.cases.registry import Announcement
from benchmarks.hangs.drawn import Drawn

for part in ("device_mesh", "fsdp", "pipelining"):  # once, before ranks are forked
    importlib.import_module(f"torch.distributed.{part}")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "flight_recorder"))
import dump_on_signal  # noqa: E402 - an example, not a package

STANDS_S = float(os.environ.get("HANG_STANDS_S", "6"))
"""How long a hang stands before the ranks are asked for their dumps."""
SILENT_KINDS = {"another collective", "another size", "nobody"}
"""Kinds of cases in which no rank announces that the job hangs."""
ANSWERS_S = 20.0
"""How long a rank has to answer."""


def run_rank(case, rank, folder, gates):
    """One rank, in a process of its own."""
    ready, Announcement.event = gates
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    sys.stderr = sys.stdout = (folder / f".log_{rank}").open("w")
    torch.set_num_threads(1)
    dump_on_signal.install(str(folder / "dump_"), rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/.store",
        rank=rank,
        world_size=case.n_ranks,
        timeout=timedelta(seconds=case.timeout_s),
    )
    ready.wait()
    case.run(rank, case.n_ranks)
    time.sleep(ANSWERS_S + STANDS_S)


def make(case, folder):
    """Run a case, ask each rank for its dump and end it.

    Returns:
        The ranks that answered.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    ready, hangs = context.Barrier(case.n_ranks + 1), context.Event()
    ranks = [
        context.Process(target=run_rank, args=(case, rank, folder, (ready, hangs)), daemon=True)
        for rank in range(case.n_ranks)
    ]
    for process in ranks:
        process.start()
    ready.wait(timeout=120)
    if case.kind not in SILENT_KINDS and not hangs.wait(timeout=60):
        sys.exit(f"{case.name}: no rank came to where it hangs")
    time.sleep(STANDS_S + case.timeout_s * (case.timeout_s < STANDS_S))
    for process in ranks:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    expected = {rank for rank, process in enumerate(ranks) if process.is_alive()}
    ends = time.monotonic() + ANSWERS_S
    cannot_answer = set(case.at_fault) if case.kind in {"dead", "two at once"} else set()
    while time.monotonic() < ends and not all(
        (folder / f"dump_{rank}").exists() for rank in expected - cannot_answer
    ):
        time.sleep(0.05)
    time.sleep(0.5)
    for process in ranks:
        process.kill()
    for process in ranks:
        process.join()
    answered = [rank for rank in range(case.n_ranks) if (folder / f"dump_{rank}").exists()]
    remove_others(folder, answered)
    label = {
        "kind": case.kind,
        "n_ranks": case.n_ranks,
        "at_fault": list(case.at_fault),
        "answered": answered,
        "torch": torch.__version__,
    }
    (folder / "label.json").write_text(json.dumps(label) + "\n")
    if not answered:
        shutil.rmtree(
            folder
        )  # the job ended: Gloo ends a process that gets many more bytes than it expects
    return answered


def remove_others(folder, answered):
    """Leave only whole dumps and their stacks."""
    for path in folder.iterdir():
        name = path.name.removesuffix(".txt")
        is_dump = name.startswith("dump_") and not name.endswith("partial")
        if not is_dump or int(name[5:]) not in answered:
            path.unlink()


def main(arguments):
    """Make the cases that are named, or all."""
    root = Path(arguments[0]).resolve()
    names = arguments[1:] or list(CASES)
    unknown = [name for name in names if name not in CASES and not name.startswith("seed_")]
    if unknown:
        sys.exit(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}, seed_N")
    for name in names:
        case = CASES[name] if name in CASES else Drawn(int(name[5:])).as_case()
        answered = make(case, root / name)
        print(f"{name}: {len(answered)} of {case.n_ranks} ranks answered", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
