"""Names for the array types that the whole program passes around."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Records = npt.NDArray[Any]
"""An array of a structured dtype: one record each, its fields read by name."""
