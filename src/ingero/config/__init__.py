"""The only reader of YAML and of the environment.

Above the error tree and the units, below everything with settings. Knows how settings are written and checked; knows no
component, so what a section *means* stands with the part it configures.

    class BatchConfig(StrictModel):
        send_batch_size: int = Field(8192, ge=1, description="Points that make a batch go out.")
        timeout: Duration = Field(parse_duration("200ms"), description="Longest wait for a batch to fill.")
"""

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
