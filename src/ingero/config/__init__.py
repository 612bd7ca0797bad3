"""The only reader of YAML and of the environment.

Above the error tree and the units, below everything with settings. Knows how settings are written and checked; knows no
component, so what a section *means* stands with the part it configures.

    class BatchConfig(StrictModel):
        send_batch_size: int = Field(8192, ge=1, description="Points that make a batch go out.")
        timeout: Duration = Field(parse_duration("200ms"), description="Longest wait for a batch to fill.")
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingero.config.model import StrictModel, check_model, parse_model
    from ingero.config.types import Duration, Endpoint, HeaderName, HeaderSecret, Secret, Size

__all__ = [
    "Duration",
    "Endpoint",
    "HeaderName",
    "HeaderSecret",
    "Secret",
    "Size",
    "StrictModel",
    "check_model",
    "parse_model",
]
_IN_MODEL = frozenset(("StrictModel", "check_model", "parse_model"))

if not TYPE_CHECKING:  # else any name would do for a type checker

    def __getattr__(name: str) -> object:
        """A name of `__all__`: what reads the environment alone needs no pydantic, which takes long to import."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(
            "ingero.config.model" if name in _IN_MODEL else "ingero.config.types"
        )
        found = getattr(module, name)
        globals()[name] = found
        return found
