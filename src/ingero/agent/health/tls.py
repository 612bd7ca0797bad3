"""Client certificates of an agent: all three files or none, and a key that only its owner reads."""

from __future__ import annotations

import stat
from pathlib import Path

from ingero.errors import ConfigProblem


def check_tls_files(
    files: tuple[str, str, str], *, is_insecure: bool, allows_loose_key: bool
) -> list[ConfigProblem]:
    """Say what is wrong with ``--fleet-tls-ca``, ``-cert`` and ``-key``; none of them set is right, too.

    Args:
        files: CA, certificate and key as given; empty when not given.
        is_insecure: TLS was switched off.
        allows_loose_key: Accept a key that others may read.
    """
    options = ("--fleet-tls-ca", "--fleet-tls-cert", "--fleet-tls-key")
    if not any(files):
        return []
    problems = []
    missing = [option for option, file in zip(options, files, strict=True) if not file]
    if missing:
        problems.append(
            ConfigProblem(missing[0], "is missing: set all three of --fleet-tls-* or none")
        )
    if is_insecure:
        problems.append(ConfigProblem("--fleet-insecure", "contradicts --fleet-tls-*"))
    for option, file in zip(options, files, strict=True):
        if file:
            problem = _check_file(file, is_key=option == options[2] and not allows_loose_key)
            problems += [ConfigProblem(option, problem)] if problem else []
    return problems


def _check_file(file: str, *, is_key: bool) -> str:
    try:
        mode = Path(file).stat().st_mode
    except OSError as error:
        return f"{file}: {error.strerror or error}"
    if not stat.S_ISREG(mode):
        return f"{file} is not a file"
    if is_key and mode & 0o077:
        return (
            f"{file} can be read by others (mode {stat.S_IMODE(mode):04o}): chmod 0600 it, or set "
            "INGERO_TLS_ALLOW_LOOSE_KEY_PERMS=1"
        )
    return ""
