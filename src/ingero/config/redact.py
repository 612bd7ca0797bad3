"""An environment without its secrets, for reports that leave the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

_SECRET: Final = (
    "TOKEN", "SECRET", "PASS", "KEY", "API_", "_API", "CREDENTIALS", "AUTH", "PRIVATE", "SESSION", "COOKIE", "AWS_",
    "GCP_", "AZURE_", "_DSN", "_URL", "_URI", "PROXY",
)  # fmt: skip
"""Parts of names whose values are left out.

Those of the existing agent's support bundle, and what carries user:password@.
"""


def build_redacted_environment(environ: Mapping[str, str] | None = None) -> str:
    """``NAME=value`` lines, sorted; a value that may be secret is replaced by its length."""
    values = os.environ if environ is None else environ
    return "".join(
        f"{name}=<{len(value)} bytes>\n"
        if any(part in name.upper() for part in _SECRET)
        else f"{name}={value}\n"
        for name, value in sorted(values.items())
    )
