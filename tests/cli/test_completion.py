"""The Tab key in a real shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
TAB = """
source <(ingero completion bash)
declare -F {function} >/dev/null || exit 3
COMP_WORDS=({words}) COMP_CWORD={at}
{function} ingero
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def run(shell, script):
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        [shell, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["ingero", "exp"], {"explain", "export"}),
        (["ingero", "merge", "--for"], {"--force", "--force-node"}),
        (["ingero", "export", "--format", ""], {"perfetto"}),
        (["ingero", "completion", "f"], {"fish"}),
    ],
)
def test_bash_completes_commands_options_and_values(typed, offered):
    words = " ".join(f"'{word}'" for word in typed)
    script = TAB.format(function="_ingero_completion", words=words, at=len(typed) - 1)
    assert set(run("bash", script)) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_script_of_another_shell_is_syntax_it_takes(shell, tmp_path):
    done = subprocess.run(
        [BIN / "ingero", "completion", shell], capture_output=True, text=True, check=True
    )
    assert "_INGERO_COMPLETE" in done.stdout
    if shutil.which(shell):
        (tmp_path / "script").write_text(done.stdout)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)
