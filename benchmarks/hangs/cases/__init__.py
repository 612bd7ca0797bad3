"""Jobs that hang, each with the ranks that were made to hang it. Run by `benchmarks.hangs.make` with an interpreter that has torch.

A case is what every rank runs after the process group exists. Its label is written beside it and says what was done on
purpose: ``late=(2,)`` and the like name the ranks whose code differs. Nothing here knows what `ingero hang` answers.
"""

from benchmarks.hangs.cases import collectives, groups, healthy, training, waits
from benchmarks.hangs.cases.registry import CASES

__all__ = ["CASES", "collectives", "groups", "healthy", "training", "waits"]
