"""A CUDA device as the small programs of ``ingero demo`` use it: NVIDIA's, or the simulator's.

Prototypes and constants: ``cuda_runtime_api.h`` and ``driver_types.h`` of CUDA 12.9 and 13.5, which agree on all that
is called here. A kernel of a loaded library is a ``cudaKernel_t``, and ``cudaLaunchKernel`` takes one as its
function.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

from ingero.errors import UnsupportedError

PTX: Final = b"""\
.version 6.0
.target sm_50
.address_size 64

.visible .entry work(.param .u64 duration_ns)
{
	.reg .pred %again;
	.reg .u64 %asked, %done, %now, %before, %gone;

	ld.param.u64 %asked, [duration_ns];
	mov.u64 %done, 0;
	mov.u64 %before, %globaltimer;
again:
	mov.u64 %now, %globaltimer;
	sub.u64 %gone, %now, %before;
	min.u64 %gone, %gone, 100000;
	add.u64 %done, %done, %gone;
	mov.u64 %before, %now;
	setp.lt.u64 %again, %done, %asked;
	@%again bra again;
	ret;
}
"""
"""A kernel that keeps its multiprocessor for so many ns.

It adds up short steps of the device's clock (PTX ISA, special registers: ``%globaltimer``), and counts a long one, in
which another process had the device, as 100 us: a kernel that was sent away has its work still before it. PTX 6.0 for
sm_50, which every driver of CUDA 12 and later compiles for its device.
"""

NEEDED: Final = "cudaLibraryLoadData"
"""The youngest function that is called; libcudart has it from CUDA 12.8 on."""

_KERNEL: Final = b"work"
_HOST_TO_DEVICE: Final = 1
_SCHEDULE_BLOCKING_SYNC: Final = 4
_RELEASE_THRESHOLD: Final = 4
_KEEP_ALL: Final = (1 << 64) - 1
_WARP: Final = 32
_HINTS: Final = {
    2: "free some of the device's memory",
    35: "install a newer driver, or a libcudart of the driver's version: nvidia-smi says which",
    46: "another process holds the device for itself (nvidia-smi -q -d COMPUTE); end it, or use --sim",
    100: "the driver offers no device: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use --sim",
    221: "the driver's compiler libnvidia-ptxjitcompiler.so.1 is missing: install all of the driver",
    222: "install a newer driver",
    802: "start nvidia-fabricmanager, or wait until it is ready",
    803: "the driver's library and its kernel module are of two versions: restart the machine",
}
"""By cudaError_t: the next step."""


class _Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class Device:
    """The first device, through the CUDA runtime. Making one calls nothing yet.

    Attributes:
        path: The library, libcudart.

    Raises:
        UnsupportedError: It cannot be loaded or lacks a function. Every method raises this too, when a call fails: the
            message has the call and the runtime's own words, and the hint what would repair it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._cudart = open_runtime(path)
        self._cudart.cudaGetErrorString.restype = ctypes.c_char_p
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._malloc = self._function("cudaMalloc", pointer, size)
        self._copy = self._function("cudaMemcpy", pointer, pointer, size, ctypes.c_int)
        self._malloc_async = self._function("cudaMallocAsync", pointer, size, pointer)
        self._free_async = self._function("cudaFreeAsync", pointer, pointer)
        self._launch = self._function(
            "cudaLaunchKernel", pointer, _Dim3, _Dim3, pointer, size, pointer
        )
        self._synchronise = self._function("cudaDeviceSynchronize")
        self._shape = _Dim3(1, 1, 1), _Dim3(_WARP, 1, 1)
        self._kernels: list[ctypes.c_void_p] = []
        self._duration_ns = ctypes.c_uint64()
        self._arguments = (pointer * 1)(ctypes.addressof(self._duration_ns))

    def _function(self, name: str, *types: type) -> Callable[..., None]:
        """A function of the runtime that raises what it does not return."""
        function = getattr(self._cudart, name)
        function.argtypes = types

        def call(*arguments: object) -> None:
            code = function(*arguments)
            if code:
                words = self._cudart.cudaGetErrorString(code).decode()
                raise UnsupportedError(f"{name}: {words} ({code})", hint=_HINTS.get(code, ""))

        return call

    def prepare(self) -> None:
        """Make the context, load one kernel and run it, so that nothing later is a first use.

        Waits sleep from here on.
        """
        self._function("cudaSetDeviceFlags", ctypes.c_uint)(_SCHEDULE_BLOCKING_SYNC)
        self.load()
        self.launch(1, 0.0)
        self.synchronise()

    def load(self, n_libraries: int = 1) -> None:
        """Load the kernel, once for each library: so many kernels, of which each has a first launch."""
        pointer = ctypes.c_void_p
        load = self._function(
            NEEDED, pointer, ctypes.c_char_p, pointer, pointer, ctypes.c_uint, pointer, pointer, ctypes.c_uint,
        )  # fmt: skip
        get = self._function("cudaLibraryGetKernel", pointer, pointer, ctypes.c_char_p)
        for _ in range(n_libraries):
            library, kernel = pointer(), pointer()
            load(ctypes.byref(library), PTX, None, None, 0, None, None, 0)
            get(ctypes.byref(kernel), library, _KERNEL)
            self._kernels.append(kernel)

    def launch(self, n_kernels: int, seconds: float) -> None:
        """Put kernels on the default stream, the loaded ones in turn, each of which takes so long."""
        self._duration_ns.value = round(seconds * 1e9)
        for i in range(n_kernels):
            kernel = self._kernels[i % len(self._kernels)]
            self._launch(kernel, *self._shape, self._arguments, 0, None)

    def synchronise(self) -> None:
        """Wait until the device has done all of it."""
        self._synchronise()

    def allocate(self, n_bytes: int) -> int:
        """Address of new device memory."""
        address = ctypes.c_void_p()
        self._malloc(ctypes.byref(address), n_bytes)
        return address.value or 0

    def copy_in(self, address: int, host: ctypes.Array[ctypes.c_char]) -> None:
        """A copy from the host's ordinary memory, which returns when it is done."""
        self._copy(address, host, len(host), _HOST_TO_DEVICE)

    def count_free_bytes(self) -> int:
        """Device memory that nobody holds."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        pointer = ctypes.c_void_p
        self._function("cudaMemGetInfo", pointer, pointer)(ctypes.byref(free), ctypes.byref(total))
        return free.value

    def open_pool(self) -> Pool:
        """The device's pool, which from here on keeps what is released into it."""
        pointer = ctypes.c_void_p
        pool = pointer()
        self._function("cudaDeviceGetDefaultMemPool", pointer, ctypes.c_int)(ctypes.byref(pool), 0)
        keep = ctypes.c_uint64(_KEEP_ALL)
        self._function("cudaMemPoolSetAttribute", pointer, ctypes.c_int, pointer)(
            pool, _RELEASE_THRESHOLD, ctypes.byref(keep)
        )
        trim = self._function("cudaMemPoolTrimTo", pointer, ctypes.c_size_t)
        return Pool(self._malloc_async, self._free_async, lambda: trim(pool, 0))


class Pool:
    """Device memory in the order of the default stream.

    Args:
        malloc: ``cudaMallocAsync``.
        free: ``cudaFreeAsync``.
        trim: Gives back to the system what the pool holds and nobody uses. What was released counts from the next
            synchronisation on.
    """

    def __init__(
        self, malloc: Callable[..., None], free: Callable[..., None], trim: Callable[[], None]
    ) -> None:
        self._malloc, self._free, self.trim = malloc, free, trim

    def allocate(self, n_bytes: int) -> int:
        """Address of memory; what the pool does not hold is mapped during the call."""
        address = ctypes.c_void_p()
        self._malloc(ctypes.byref(address), n_bytes, None)
        return address.value or 0

    def release(self, address: int) -> None:
        """Leave it to the pool."""
        self._free(address, None)


def open_runtime(path: str) -> ctypes.CDLL:
    """Load a libcudart.

    Raises:
        UnsupportedError: It is none, it cannot be loaded, or it is too old to load a kernel.
    """
    try:
        cudart = ctypes.CDLL(path)
    except OSError as error:
        raise UnsupportedError(f"{path} cannot be loaded: {error}") from error
    if not hasattr(cudart, "cudaRuntimeGetVersion"):
        raise UnsupportedError(f"{path} is no libcudart")
    if not hasattr(cudart, NEEDED):
        major, minor = find_version(cudart, "cudaRuntimeGetVersion")
        raise UnsupportedError(
            f"{path} is of CUDA {major}.{minor}, and {NEEDED} came with 12.8",
            hint="pip install 'nvidia-cuda-runtime-cu12>=12.8'",
        )
    return cudart


def find_version(cudart: ctypes.CDLL, name: str) -> tuple[int, int]:
    """What ``cudaRuntimeGetVersion`` or ``cudaDriverGetVersion`` says, as (major, minor); (0, 0) without a driver."""
    version = ctypes.c_int()
    getattr(cudart, name)(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10
