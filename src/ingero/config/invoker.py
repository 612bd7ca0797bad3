"""Who really asks, behind sudo: files belong to that user, and programs started for them run as them."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Invoker:
    """A user.

    Attributes:
        uid: Their user id.
        gid: Their group id.
        name: Their login name; empty when the system does not know one.
        home: Their home directory; empty when unknown.
    """

    uid: int
    gid: int
    name: str
    home: str


def find_invoker(environ: Mapping[str, str] | None = None) -> Invoker:
    """The user who called sudo, or this process's own."""
    values = os.environ if environ is None else environ
    uid, gid = os.geteuid(), os.getegid()
    given = values.get("SUDO_UID", ""), values.get("SUDO_GID", "")
    if uid == 0 and given[0].isdecimal() and given[1].isdecimal():
        uid, gid = int(given[0]), int(given[1])
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return Invoker(uid, gid, "", "")
    return Invoker(uid, gid, entry.pw_name, entry.pw_dir)


def build_child_environment(
    invoker: Invoker, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Our environment as the invoking user would have it: their HOME and names, without sudo's own variables."""
    values = dict(os.environ if environ is None else environ)
    for name in list(values):
        if name.startswith("SUDO_"):
            del values[name]
    if invoker.home:
        values["HOME"] = invoker.home
    if invoker.name:
        values["USER"] = values["LOGNAME"] = invoker.name
    return values
