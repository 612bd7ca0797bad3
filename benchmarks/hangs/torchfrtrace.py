"""What PyTorch's own analyzer, ``torchfrtrace``, does with the same dumps."""

import json
import subprocess
from pathlib import Path

from ingero.config.torch import find_torch_python

_RUN = """
import contextlib, io, json, re, sys
from torch.distributed.flight_recorder.fr_trace import main
for folder in sys.argv[1:]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main([folder, "--prefix", "dump_", "--allow-incomplete-ranks"])
        ended = "finished"
    except (Exception, SystemExit) as error:
        ended = type(error).__name__
    print(json.dumps(ended))
"""


def ask(folders):
    """How it ended on each folder of dumps alone: ``finished``, or the class of its error; None where no interpreter has torch."""
    python = find_torch_python()
    if python is None:
        return [None] * len(folders)
    done = subprocess.run(
        [python, "-c", _RUN, *folders], cwd=Path("/"), capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
