"""Plays NCCL's side of its profiler interface, strictly as documented, on the built plug-in.

Source of layouts and contract: NCCL's plugins/profiler/README.md and profiler_v4.h, profiler_v5.h. Written down a
second time here, in ctypes and whole, so that a slip in ncclprof/api.h shows.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint8, c_uint64, c_void_p

from ingero.agent.collectives.plugin import find_plugin

GROUP, COLL, P2P, KERNEL_CH = 1 << 0, 1 << 1, 1 << 2, 1 << 6
COLL_API = 1 << 9
KERNEL_CH_STOP = 22
LOGGER = ctypes.CFUNCTYPE(None, c_int, ctypes.c_ulong, c_char_p, c_int, c_char_p)


class Coll(ctypes.Structure):
    _fields_ = [
        ("seqNumber", c_uint64),
        ("func", c_char_p),
        ("sendBuff", c_void_p),
        ("recvBuff", c_void_p),
        ("count", c_size_t),
        ("root", c_int),
        ("datatype", c_char_p),
        ("nChannels", c_uint8),
        ("nWarps", c_uint8),
        ("algo", c_char_p),
        ("proto", c_char_p),
        ("parentGroup", c_void_p),  # from version 5 on
    ]


class KernelCh(ctypes.Structure):
    _fields_ = [("channelId", c_uint8), ("pTimer", c_uint64)]


class Told(ctypes.Union):
    _fields_ = [("coll", Coll), ("kernelCh", KernelCh)]


class EventV4(ctypes.Structure):
    _anonymous_ = ("told",)
    _fields_ = [("type", c_uint8), ("parentObj", c_void_p), ("rank", c_int), ("told", Told)]


class EventV5(ctypes.Structure):
    _anonymous_ = ("told",)
    _fields_ = [("type", c_uint64), ("parentObj", c_void_p), ("rank", c_int), ("told", Told)]


class State(ctypes.Union):
    _fields_ = [("transSize", c_size_t), ("pTimer", c_uint64), ("data", c_void_p)]


def build_interface(event, *init):
    class Interface(ctypes.Structure):
        _fields_ = [
            ("name", c_char_p),
            (
                "init",
                ctypes.CFUNCTYPE(c_int, POINTER(c_void_p), *init, c_int, c_int, c_int, LOGGER),
            ),
            ("startEvent", ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), POINTER(event))),
            ("stopEvent", ctypes.CFUNCTYPE(c_int, c_void_p)),
            ("recordEventState", ctypes.CFUNCTYPE(c_int, c_void_p, c_int, POINTER(State))),
            ("finalize", ctypes.CFUNCTYPE(c_int, c_void_p)),
        ]

    return Interface


InterfaceV4 = build_interface(EventV4, POINTER(c_int), c_char_p, c_uint64)
InterfaceV5 = build_interface(EventV5, c_uint64, POINTER(c_int), c_char_p)


class Plugin:
    """One version of the plug-in's interface; `interface` beats the symbol of that version."""

    def __init__(self, version=6, interface=None):
        self.version = version
        self.event = EventV4 if version == 4 else EventV5
        kind = InterfaceV4 if version == 4 else InterfaceV5
        self.library = ctypes.CDLL(str(find_plugin()))
        self.interface = interface or kind.in_dll(self.library, f"ncclProfiler_v{version}")
        self.said = []
        self.logger = LOGGER(lambda _level, _flags, _file, _line, text: self.said.append(text))

    def init(self, comm=0xABC, rank=1, n_ranks=4, n_nodes=2):
        context, mask = c_void_p(0xDEAD), c_int(-1)
        place = (n_nodes, n_ranks, rank, self.logger)
        told = (
            (ctypes.byref(mask), b"world", comm)
            if self.version == 4
            else (comm, ctypes.byref(mask), b"world")
        )
        assert self.interface.init(ctypes.byref(context), *told, *place) == 0
        return Communicator(self, context.value, mask.value)


class Communicator:
    def __init__(self, plugin, context, mask):
        self.plugin, self.context, self.mask = plugin, context, mask

    def start(self, event_type, parent=None, **told):
        event = self.plugin.event()
        ctypes.memset(ctypes.byref(event), 0xA5, ctypes.sizeof(event))  # NCCL's own is not cleared
        event.type, event.parentObj, event.rank = event_type, parent, 99
        for part, values in told.items():
            for name, value in values.items():
                setattr(getattr(event, part), name, value)
        handle = c_void_p(0xBAD)
        interface = self.plugin.interface
        assert interface.startEvent(self.context, ctypes.byref(handle), ctypes.byref(event)) == 0
        return handle.value

    def stop(self, handle):
        assert self.plugin.interface.stopEvent(handle) == 0

    def record(self, handle, state, value=0):
        told = State(pTimer=value)
        assert self.plugin.interface.recordEventState(handle, state, ctypes.byref(told)) == 0

    def enqueue(self, n_channels=2, func=b"AllReduce", count=1000, datatype=b"ncclFloat32"):
        """What NCCL does while the call of a collective lasts; the handle."""
        coll = {
            "seqNumber": 7,
            "func": func,
            "count": count,
            "datatype": datatype,
            "nChannels": n_channels,
        }
        coll |= {"root": 0, "nWarps": 16, "algo": b"RING", "proto": b"SIMPLE"}
        handle = self.start(COLL, coll=coll)
        self.stop(handle)
        return handle

    def begin_channel(self, parent, channel, gpu_ns):
        return self.start(KERNEL_CH, parent, kernelCh={"channelId": channel, "pTimer": gpu_ns})

    def end_channel(self, handle, gpu_ns):
        self.record(handle, KERNEL_CH_STOP, gpu_ns)
        self.stop(handle)

    def play(self, start_ns, stop_ns, n_channels=2, **told):
        """A whole collective whose channels begin and end 10 ns apart."""
        parent = self.enqueue(n_channels, **told)
        channels = [self.begin_channel(parent, i, start_ns + 10 * i) for i in range(n_channels)]
        for i, channel in enumerate(channels):
            self.end_channel(channel, stop_ns - 10 * i)

    def finalize(self):
        assert self.plugin.interface.finalize(self.context) == 0
