"""The C compiler of tests: for the C library that the simulator is built for, so that zig has what it links already.

For any other target zig first compiles its run-time library, half a minute of a processor.
"""

import platform
import sys

CC = (
    *(sys.executable, "-m", "ziglang", "cc", "-O1", "-fno-sanitize=all"),
    *("-target", f"{platform.machine()}-linux-gnu.2.28"),
)
