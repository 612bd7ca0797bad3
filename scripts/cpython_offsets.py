"""Prints where a CPython keeps what `ingero.agent.capture.stacks.layouts` names, as its own headers say.

    python scripts/cpython_offsets.py ~/.pyenv/versions/3.12.1/include/python3.12 [aarch64]

Compiles a table against the internal headers with PyPI's ``ziglang`` and reads it. The tables of 3.9 to 3.12 are
its output, the same for both processors; ``tests/agent/capture/stacks/test_layouts.py`` compares every table with every
interpreter whose headers are here.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from ingero.agent.capture.kernel.elf import find_section

_ROW = struct.Struct("<24sQ")

PROGRAM = r"""
#define Py_BUILD_CORE 1
#include <Python.h>
#include <stddef.h>
#include "internal/pycore_interp.h"
#include "internal/pycore_runtime.h"
#if PY_VERSION_HEX >= 0x030b0000
#include "internal/pycore_frame.h"
#include "internal/pycore_code.h"
#else
#include <frameobject.h>
#endif
#define AT(name, type, field) {name, offsetof(type, field)},

__attribute__((section("offsets"), used)) static const struct {
	char name[24];
	unsigned long value;
} rows[] = {
	AT("interpreters_head", _PyRuntimeState, interpreters.head)
	AT("interpreter_next", PyInterpreterState, next)
	AT("thread_prev", PyThreadState, prev)
	AT("thread_next", PyThreadState, next)
	AT("thread_interpreter", PyThreadState, interp)
	AT("thread_id", PyThreadState, thread_id)
#if PY_VERSION_HEX >= 0x030b0000
	AT("threads_head", PyInterpreterState, threads.head)
	AT("frame_previous", _PyInterpreterFrame, previous)
	AT("frame_owner", _PyInterpreterFrame, owner)
	AT("code_first", PyCodeObject, co_code_adaptive)
	AT("code_name", PyCodeObject, co_qualname)
#else
	AT("threads_head", PyInterpreterState, tstate_head)
	AT("thread_frame", PyThreadState, frame)
	AT("frame_previous", PyFrameObject, f_back)
	AT("frame_code", PyFrameObject, f_code)
	AT("frame_instruction", PyFrameObject, f_lasti)
	AT("code_name", PyCodeObject, co_name)
#endif
#if PY_VERSION_HEX >= 0x030d0000
	AT("thread_frame", PyThreadState, current_frame)
	AT("frame_code", _PyInterpreterFrame, f_executable)
	AT("frame_instruction", _PyInterpreterFrame, instr_ptr)
#elif PY_VERSION_HEX >= 0x030b0000
	AT("thread_frame", PyThreadState, cframe)
	AT("cframe_frame", _PyCFrame, current_frame)
	AT("frame_code", _PyInterpreterFrame, f_code)
	AT("frame_instruction", _PyInterpreterFrame, prev_instr)
#if PY_VERSION_HEX < 0x030c0000
	AT("frame_entry", _PyInterpreterFrame, is_entry)
#endif
#endif
	AT("code_filename", PyCodeObject, co_filename)
	AT("code_first_line", PyCodeObject, co_firstlineno)
#if PY_VERSION_HEX >= 0x030a0000
	AT("code_lines", PyCodeObject, co_linetable)
#else
	AT("code_lines", PyCodeObject, co_lnotab)
#endif
	AT("text_length", PyASCIIObject, length)
	AT("text_state", PyASCIIObject, state)
	AT("bytes_length", PyVarObject, ob_size)
	AT("bytes_data", PyBytesObject, ob_sval)
	AT("object_type", PyObject, ob_type)
	{"text_ascii", sizeof(PyASCIIObject)},
	{"text_wide", sizeof(PyCompactUnicodeObject)},
};
"""


def read_offsets(include: Path, machine: str = "") -> dict[str, int]:
    """Offsets in bytes by name, from the folder that holds ``Python.h``.

    Args:
        include: The folder.
        machine: The processor, as ``uname -m`` says; empty for this machine's. What is compiled is only read.

    Raises:
        subprocess.CalledProcessError: The headers do not compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "offsets.c", Path(folder) / "offsets.o"
        source.write_text(PROGRAM)
        # Debian keeps pyconfig.h in a folder of the architecture, beside the versions.
        folders = (include, include / "internal", include.parent)
        target = ("-target", f"{machine}-linux-gnu") if machine else ()
        subprocess.run(
            [
                *(sys.executable, "-m", "ziglang", "cc", *target),
                *("-w", "-c", str(source), "-o", str(made)),
                *(f"-I{path}" for path in folders),
                *(f"-idirafter{path}" for path in include.parent.glob("*-linux-gnu")),
            ],
            check=True,
            capture_output=True,
        )
        section = find_section(made.read_bytes(), "offsets")
    assert section is not None
    return {name.rstrip(b"\0").decode(): value for name, value in _ROW.iter_unpack(section)}


if __name__ == "__main__":
    if len(sys.argv) not in {2, 3}:
        sys.exit(__doc__)
    print(json.dumps(read_offsets(Path(sys.argv[1]), *sys.argv[2:]), indent=1))
