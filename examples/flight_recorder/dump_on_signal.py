"""Have a training script write its Flight Recorder and its stack whenever it gets SIGUSR1.

Gloo has no watchdog that writes dumps, and a signal handler of Python does not run while the main thread waits inside a
collective. A thread that waits for the signal's byte does run. Call it once, after `init_process_group`:

    import dump_on_signal
    dump_on_signal.install("/tmp/fr/dump_", torch.distributed.get_rank())

and later, on each node (``-u`` is how torchrun starts ranks; the launcher itself would end at the signal):

    pkill -USR1 -f 'python[0-9.]* -u .*train[.]py'

Two files appear for each rank: ``/tmp/fr/dump_3``, the recorder, and ``/tmp/fr/dump_3.txt``, the stack.
``ingero hang /tmp/fr`` reads both.
"""

import faulthandler
import os
import signal
import threading
from pathlib import Path

from torch._C import _distributed_c10d  # PyTorch 2.13: no public name


def install(prefix: str, rank: int) -> None:
    """Write ``PREFIX RANK`` and ``PREFIX RANK.txt`` at each SIGUSR1 from now on. Call it in the main thread."""
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR1, lambda _signal, _frame: None)
    threading.Thread(target=_serve, args=(reader, f"{prefix}{rank}"), daemon=True).start()


def _serve(reader: int, path: str) -> None:
    while byte := os.read(reader, 1):
        if byte[0] != signal.SIGUSR1:
            continue
        partial = Path(f"{path}.partial")
        partial.touch()  # naming the lines of all entries can take seconds
        with Path(f"{path}.txt").open("w") as stack:
            faulthandler.dump_traceback(stack, all_threads=True)
        partial.write_bytes(_distributed_c10d._dump_fr_trace())  # noqa: SLF001 - it has no other
        asked_ns = (
            Path(f"{path}.txt").stat().st_mtime_ns
        )  # naming the lines of all entries can take seconds
        os.utime(partial, ns=(asked_ns, asked_ns))
        partial.rename(path)  # whoever looks for the dump finds a whole one
