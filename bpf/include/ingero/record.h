/* The records that cross from the kernel to user space, and the values of shared maps. This file is the ABI.
 *
 * Every record begins with struct ig_header. All times are CLOCK_MONOTONIC nanoseconds; all byte counts are bytes.
 * A field says what its absence looks like. The NumPy dtypes in ingero.agent.capture.kernel are read from this file's BTF in
 * the built object, so there is no second description. docs/specs/record.md is the page for people.
 *
 * Rule for changes: fields are only appended or given to padding; IG_RECORD_VERSION rises with every change.
 */
#ifndef INGERO_RECORD_H
#define INGERO_RECORD_H

#include "ingero/kernel.h"

enum ig_limit {
	IG_RECORD_VERSION = 7,
	IG_COMM_LEN = 16,
	IG_MAX_DEPTH = 8,
	IG_MAX_DESCRIPTORS = 1024,
	IG_N_REGS = 8,
	/* Latency buckets: below 2^7 ns, then four per octave up to 2^38 ns (275 s), then the rest. */
	IG_HIST_FIRST_LOG2 = 7,
	IG_HIST_BUCKETS = 126,
	IG_N_COPY_KINDS = 6, /* cudaMemcpyKind, and the last for any other number */
	IG_MAX_NATIVE = 127, /* kernel.perf_event_max_stack as it comes */
	IG_MAX_PYTHON = 128,
	IG_MAX_RETURNS = 8,
	IG_COPY_BYTES = 5 * 4096, /* of a thread's stack: whole pages, so 16 KiB at least */
	IG_LARGE_BYTES = 1 << 20,
	IG_LONG_REQUEST_NS = 10000000,
	IG_FLOOD = 16384,         /* records beside the sampled ones, per IG_WINDOW of one count */
	IG_MOST_STACKS = 32,      /* stacks of slow and failed calls, likewise */
	IG_WINDOW_LOG2 = 30,      /* 2^30 ns: 1.07 s */
};

/* What the bytes after the header are. */
enum ig_kind {
	IG_KIND_CALL = 1,
	IG_KIND_COLLECTIVE = 2,
	IG_KIND_OFF_CPU = 3,
	IG_KIND_PROCESS = 4,
	IG_KIND_BLOCK = 6,
	IG_KIND_TCP = 7,
	IG_KIND_STACK = 8,
	IG_KIND_SPAN = 9,
	IG_KIND_STACK_COPY = 10,
	IG_KIND_UNFINISHED = 11,
};

/* Where an operation was seen. The numbers are those of the recorded databases. */
enum ig_source {
	IG_SOURCE_CUDA = 1,
	IG_SOURCE_HOST = 3,
	IG_SOURCE_DRIVER = 4,
	IG_SOURCE_IO = 5,
	IG_SOURCE_TCP = 6,
	IG_SOURCE_NET = 7,
	IG_SOURCE_CUDA_GRAPH = 8,
	IG_SOURCE_NCCL = 9,
	IG_SOURCE_GLOO = 11, /* 10 is NVML's, which no probe sees; C++: never with a return probe */
	IG_N_SOURCES = 16,
};

/* Operations of the sources that are not library calls. The numbers are those of the recorded databases. */
enum ig_host_op {
	IG_HOST_SCHED_SWITCH = 1,
	IG_HOST_PAGE_ALLOC = 3,
	IG_HOST_PAGE_FAULT = 30,
	IG_HOST_DIRECT_RECLAIM = 31,
};

enum ig_io_op {
	IG_IO_READ = 1,
	IG_IO_WRITE = 2,
	IG_IO_DISCARD = 3,
	IG_IO_FLUSH = 4,
	IG_IO_OTHER = 5, /* zeroes, erasure, zones, commands */
};

enum ig_tcp_op {
	IG_TCP_RETRANSMIT = 1,
};

enum ig_net_op {
	IG_NET_SEND = 1,
	IG_NET_RECV = 2,
};

enum ig_flag {
	IG_FLAG_NESTED = 1,  /* made by another probed call on the same thread: do not count twice */
	IG_FLAG_ERROR = 2,   /* the return code was an error */
	IG_FLAG_GROUPED = 4, /* inside ncclGroupStart/ncclGroupEnd */
	IG_FLAG_SLOW = 8,    /* took eight times the mean of its kind or more */
	IG_FLAG_FIRST = 16,  /* kept because it is among the first of its kind */
	IG_FLAG_NO_TIME = 32, /* entry-only probe: duration_ns and rc are not known */
	IG_FLAG_LARGE = 64,   /* kept because it moved IG_LARGE_BYTES, or kept a disk for IG_LONG_REQUEST_NS, or more */
	IG_FLAG_EXACT = 128,  /* of a kind that is never sampled: ig_settings.exact */
};

struct ig_header {
	u16 kind;
	u16 version;
	u32 size;    /* of the whole record */
	u64 mono_ns; /* start of what the record describes */
};
_Static_assert(sizeof(struct ig_header) == 16, "ABI");

/* One call of the CUDA runtime, driver or graph API. */
struct ig_call {
	struct ig_header header; /* mono_ns: entry */
	u64 duration_ns;         /* entry to return; 0 with IG_FLAG_NO_TIME */
	u64 cgroup_id;           /* cgroup v2 id; 0 or 1: none */
	u64 bytes;               /* copied, allocated, freed or set; 0 when the call moves none */
	u64 handle;              /* device pointer, kernel function, graph exec, event ...; 0: none */
	u64 stream;              /* stream handle; 0: the default stream, or the call has none */
	u64 aux;                 /* copy kind, flags, capture mode, source graph: by operation */
	u32 pid;                 /* thread group, as the initial pid namespace sees it */
	u32 tid;
	s32 rc;
	u32 weight;  /* how many calls this record stands for, itself included */
	u32 grid_x;  /* launch geometry; 0: not a launch */
	u16 grid_y;
	u16 grid_z;
	u16 block_x;
	u16 block_y;
	u16 block_z;
	u16 cpu;
	u16 op;
	s16 device; /* of the last successful cudaSetDevice or cuCtxSetCurrent of this thread; -1: not seen */
	u8 source;
	u8 flags;
	u8 depth; /* probed calls around this one on the same thread */
	u8 reserved;
	char comm[IG_COMM_LEN];
	u64 stack_id; /* of an ig_stack; 0: not recorded */
};
_Static_assert(sizeof(struct ig_call) == 128, "ABI");

/* One call of NCCL or Gloo. */
struct ig_collective {
	struct ig_header header; /* mono_ns: entry */
	u64 duration_ns;         /* entry to return, which is enqueue time for an asynchronous call */
	u64 cgroup_id;
	u64 comm_hash; /* equal on all ranks of a communicator; 0: communicator made before we looked */
	u64 comm_ptr;  /* ncclComm_t or gloo::Context in that process */
	u64 stream;
	u64 seq;   /* 1-based number of this collective on its communicator; 0: not a collective */
	u64 count; /* elements */
	u64 bytes; /* count times the size of the type */
	u32 pid;
	u32 tid;
	s32 rc;
	u32 weight;
	s32 rank;     /* -1: not known */
	s32 nranks;   /* -1: not known */
	s32 peer;     /* peer or root; -1: none */
	u32 group_id; /* number of the ncclGroup on this thread; 0: not grouped */
	u16 op;
	s16 device;
	u16 cpu;
	s8 dtype; /* ncclDataType_t; -1: none */
	s8 redop; /* ncclRedOp_t; -1: none */
	u8 source;
	u8 flags;
	u8 depth;
	u8 reserved[5];
	char comm[IG_COMM_LEN];
	u64 stack_id; /* of an ig_stack; 0: not recorded */
};
_Static_assert(sizeof(struct ig_collective) == 152, "ABI");

enum ig_off_cpu_reason {
	IG_OFF_PREEMPTED = 1, /* still runnable, another task took the CPU */
	IG_OFF_IO = 2,        /* uninterruptible, or waits for I/O */
	IG_OFF_SLEEP = 3,     /* interruptible: waits for an event, a lock, a timer */
	IG_OFF_STOPPED = 5,   /* stopped, traced or frozen */
};

/* One span off the CPU of a thread that we watch. */
struct ig_off_cpu {
	struct ig_header header; /* mono_ns: when it left the CPU */
	u64 off_ns;              /* until it ran again */
	u64 wait_ns;             /* the part of off_ns that it was runnable and did not run */
	u64 cgroup_id;
	u32 pid;
	u32 tid;
	u32 other_pid; /* thread group that took the CPU when it left */
	u32 waker_pid; /* thread group that woke it; 0: not seen */
	u16 cpu;
	u8 reason;
	u8 flags;
	u32 weight;
	char comm[IG_COMM_LEN];
	char other_comm[IG_COMM_LEN];
};
_Static_assert(sizeof(struct ig_off_cpu) == 96, "ABI");

/* A thread of a watched GPU process that is off the CPU now: a value of the map `departures`, by tid. */
struct ig_departure {
	u64 left_ns;
	u64 woken_ns; /* 0: not woken yet, or it never stopped being runnable */
	u32 other_pid;
	u32 waker_pid;
	u8 reason;
	u8 reserved[7];
	char other_comm[IG_COMM_LEN];
};
_Static_assert(sizeof(struct ig_departure) == 48, "ABI");

enum ig_process_event {
	IG_PROCESS_OOM = 4,
	IG_PROCESS_EXEC = 5,
	IG_PROCESS_EXIT = 6,
	IG_PROCESS_FORK = 7,
};

/* A process began, ended, replaced its image or was chosen by the OOM killer. Threads are not reported. */
struct ig_process {
	struct ig_header header;
	u64 cgroup_id;
	u32 pid;
	u32 other_pid; /* parent of a fork; otherwise 0 */
	u32 uid;
	s32 exit_code; /* wait status of an exit */
	u16 event;
	u16 reserved[3];
	char comm[IG_COMM_LEN];
};
_Static_assert(sizeof(struct ig_process) == 64, "ABI");

/* One block request, from issue to completion. */
struct ig_block {
	struct ig_header header; /* mono_ns: issue */
	u64 queue_ns;            /* from insertion to issue; 0: issued directly */
	u64 device_ns;           /* from issue to completion */
	u64 sector;
	u64 cgroup_id;
	u32 bytes;
	u32 device; /* major << 20 | minor */
	u32 pid;    /* who issued it; a kernel thread for write-back */
	s32 error; /* 0, a negative errno (Linux 5.15), or a blk_status_t */
	u16 op; /* ig_io_op */
	u8 flags;
	u8 reserved;
	u32 weight;
	char comm[IG_COMM_LEN];
};
_Static_assert(sizeof(struct ig_block) == 88, "ABI");

/* One TCP segment sent again. Addresses in network order, IPv4 in the first four bytes. */
struct ig_tcp {
	struct ig_header header;
	u8 local[16];
	u8 remote[16];
	u16 local_port;
	u16 remote_port;
	u16 family; /* 2 IPv4, 10 IPv6 */
	u16 state;
	u32 pid; /* who used the socket last; 0: not looked at, which is so without a filter */
	u32 reserved;
};
_Static_assert(sizeof(struct ig_tcp) == 64, "ABI");

enum ig_stack_flag {
	IG_STACK_PYTHON_CUT = 1,    /* there are more Python frames than fit */
	IG_STACK_PYTHON_BROKEN = 2, /* a frame could not be read: what follows it is missing */
	IG_STACK_NO_PYTHON = 4,     /* no interpreter of this process is known, or it has not met this thread */
	IG_STACK_UNWOUND = 8,       /* native frames are by unwind tables; otherwise by frame pointer */
	IG_STACK_COPIED = 16,       /* the last of native has no rule yet: an ig_stack_copy goes on from there */
	IG_STACK_NATIVE_CUT = 32,   /* there are more native frames than fit */
	IG_STACK_NO_RULE = 64,      /* unwinding stopped: what the last of native is from does not tell how to go on */
};

enum ig_python_frame_flag {
	IG_FRAME_ENTRY = 1, /* its evaluation began a new C frame: native frames come next, outwards */
};

struct ig_python_frame {
	u64 code;   /* PyCodeObject */
	s32 offset; /* of the instruction being executed, in bytes from the first; negative: not begun */
	u32 flags;
};
_Static_assert(sizeof(struct ig_python_frame) == 16, "ABI");

/* Where a thread was, innermost first. Written once per stack: calls that share it carry its id. */
struct ig_stack {
	struct ig_header header; /* mono_ns: when it was first seen */
	u64 id;
	u32 pid;
	u32 tid;
	u16 n_native;
	u16 n_python;
	u32 flags;
	u64 native[IG_MAX_NATIVE]; /* by frame pointer, of code built without only the innermost are right; see flags */
	struct ig_python_frame python[IG_MAX_PYTHON];
};
_Static_assert(sizeof(struct ig_stack) == 40 + 8 * 127 + 16 * 128, "ABI");

/* A return address that the kernel had replaced to catch a function's return. */
struct ig_return {
	u64 slot; /* x86-64: where it lies on the stack; arm64: the CFA of the function that it is the return address of */
	u64 address;
};
_Static_assert(sizeof(struct ig_return) == 16, "ABI");

/* A thread's stack as it was, from the innermost frame that no ig_unwind_rule is known for. Written before its ig_stack. */
struct ig_stack_copy {
	struct ig_header header;
	u64 id;    /* of the ig_stack */
	u64 image; /* as in ig_unwind_key */
	u64 pc;    /* as in ig_unwind_key */
	u64 sp;
	u64 bp;
	u32 pid;
	u32 n_bytes; /* of data: fewer than IG_COPY_BYTES where the stack begins */
	struct ig_return returns[IG_MAX_RETURNS]; /* innermost first; of slot 0: there is none */
	u8 data[IG_COPY_BYTES];                   /* begins with the 4 KiB that sp points into */
	u64 link;                                 /* arm64: x30 in that frame; 0: it does not say where the frame returns to */
	u32 is_sp_least;                          /* arm64: sp is not known; it is this or more */
	u32 reserved;
};
_Static_assert(sizeof(struct ig_stack_copy) == 64 + 16 * 8 + 5 * 4096 + 16, "ABI");

/* One thing that a GPU process did in the kernel: bytes on a socket, memory it had to reclaim. */
struct ig_span {
	struct ig_header header; /* mono_ns: start; of a socket's bytes the end, where only that is told */
	u64 duration_ns;         /* 0 with IG_FLAG_NO_TIME */
	u64 cgroup_id;
	u64 amount; /* bytes */
	u32 pid;
	u32 tid;
	u32 weight;
	s32 rc; /* 0, or the error of a socket call */
	u16 op;
	u16 family; /* of a socket: 1 Unix, 2 IPv4, 10 IPv6, 16 netlink ...; otherwise 0 */
	u8 source;
	u8 flags;
	u8 reserved[2];
	char comm[IG_COMM_LEN];
};
_Static_assert(sizeof(struct ig_span) == 80, "ABI");

/* ── Values of shared maps ───────────────────────────────────────────────── */

struct ig_count_key {
	u32 pid;
	u16 op;
	u8 source;
	u8 reserved;
};
_Static_assert(sizeof(struct ig_count_key) == 8, "ABI");

/* Exact, for every call. seen = emitted + sampled + lost, always; entered - seen = in flight or killed. */
struct ig_count {
	u64 entered;
	u64 seen;
	u64 nested;
	u64 errors;
	u64 bytes;
	u64 total_ns;
	u64 min_ns; /* 0: no call had a duration */
	u64 max_ns;
	u64 emitted; /* records written; not counted in the kernel, but reckoned from the others by who reads them */
	u64 sampled; /* left out on purpose */
	u64 lost;    /* the ring was full, or there were more than IG_FLOOD */
	u64 pending; /* left out since the last record that will carry them in its weight */
	u32 window;   /* the time in units of 2^IG_WINDOW_LOG2 ns, to which the next two belong */
	u32 n_kept;   /* records beside the sampled ones */
	u32 n_stacks; /* of slow and failed calls */
	u32 reserved;
	u64 hist[IG_HIST_BUCKETS];
};
_Static_assert(sizeof(struct ig_count) == 1120, "ABI");

/* Losses that have no operation to be counted under. */
struct ig_losses {
	u64 uncounted;    /* calls without a slot in the counts map */
	u64 unmatched;    /* returns without an entry */
	u64 too_deep;     /* calls nested deeper than IG_MAX_DEPTH */
	u64 no_thread;    /* calls of threads that did not fit the threads map */
	u64 allocs_full;  /* allocations whose size will be unknown at the free */
	u64 comms_full;   /* communicators that did not fit */
	u64 host_lost[8]; /* host records lost, by ig_kind */
	u64 stacks_lost;  /* calls whose stack did not fit into the ring */
	u64 pids_full;    /* times that a process did not fit a map of processes */
	u64 requests_full; /* times that a block request did not fit: it, or its time in the queue, is missing */
	u64 contexts_full; /* contexts that did not fit */
};
_Static_assert(sizeof(struct ig_losses) == 144, "ABI");

/* How the native frames of stacks were found; the sum is of all stacks. */
struct ig_unwinding {
	u64 by_rules;          /* by ig_unwind_rule, every frame */
	u64 copied;            /* the outer ones from an ig_stack_copy */
	u64 by_frame_pointer;  /* a rule was missing, and a copy was not due */
	u64 copies_lost;       /* the same, because the copy did not fit into the ring */
};
_Static_assert(sizeof(struct ig_unwinding) == 32, "ABI");

/* Which records of calls carry the stack that they were made from. */
enum ig_stacks {
	IG_STACKS_NONE = 0,
	IG_STACKS_ALL = 1,
	IG_STACKS_NOTABLE = 2, /* the slow and the failed, at most IG_MOST_STACKS in a second of one kind in one process */
};

/* Live settings, written by user space at any time. */
struct ig_settings {
	u32 filter;  /* bits: 1 pids map, 2 cgroups map, 4 uid; 0 watches everything; bits are alternatives */
	u32 uid;
	u32 keep_one_in; /* records kept among the calls of kinds that are sampled; 1 keeps all */
	u32 keep_first;  /* records always kept per (process, operation) */
	u32 stacks;      /* an ig_stacks */
	u32 is_over;     /* 1: nothing is counted and nothing returns any more, so that counts and records agree */
	u64 exact[IG_N_SOURCES]; /* kinds that are never sampled: bit op of the word of a source */
	u32 page_log2; /* of the size of the kernel's pages: 12, or 14 or 16 on arm64 */
	u32 reserved;
};
_Static_assert(sizeof(struct ig_settings) == 160, "ABI");

/* Where an interpreter keeps what leads to the frames of a thread. Offsets in bytes; IG_NO_OFFSET: there is none. */
enum { IG_NO_OFFSET = 0xffff };
struct ig_python {
	u64 runtime; /* address of _PyRuntime */
	u32 interpreters_head;
	u32 interpreter_next;
	u32 threads_head;
	u32 thread_next;
	u32 thread_id;
	u32 thread_frame;
	u32 cframe_frame;   /* the frame hangs on a _PyCFrame: 3.11 and 3.12 */
	u32 frame_previous; /* these six lie below IG_FRAME_BYTES */
	u32 frame_code;
	u32 frame_instruction;
	u32 frame_owner;
	u32 frame_entry;
	u32 code_first;       /* co_code_adaptive; IG_NO_OFFSET: the frame holds an index, not an address */
	u32 instruction_unit; /* bytes per unit of that index */
};
_Static_assert(sizeof(struct ig_python) == 64, "ABI");

/* How to get from a frame to its caller, for one address of one process. Source: DWARF 5 section 6.4; registers as the
 * System V x86-64 psABI and DWARF for the Arm 64-bit Architecture number them. The stack pointer is rsp or sp, the frame pointer rbp or x29.
 * The caller's stack pointer is the CFA. On x86-64 the return address is at CFA - 8.
 */
enum ig_unwind_kind {
	IG_UNWIND_SP = 1,        /* CFA = stack pointer + cfa_offset */
	IG_UNWIND_BP = 2,        /* CFA = frame pointer + cfa_offset */
	IG_UNWIND_REALIGNED = 3, /* x86-64: CFA = *(rbp + cfa_offset), rbp = *(rbp + bp_offset): the function aligned its stack */
	IG_UNWIND_SIGNAL = 4,    /* the frame that the kernel pushed for a signal handler */
	IG_UNWIND_END = 5,       /* the thread's outermost function */
	IG_UNWIND_UNKNOWN = 6,   /* nothing is known: stop */
	IG_UNWIND_RECORD = 7,    /* arm64: x29 leads to the caller's x29 and the return address; its stack pointer is not told */
};

struct ig_unwind_rule {
	s32 cfa_offset;
	s32 bp_offset;     /* the caller's frame pointer is saved at CFA + this; 0: it is still in its register */
	s32 return_offset; /* arm64: the return address is saved at CFA + this; 0: it is still in x30 */
	u8 kind;
	u8 reserved[3];
};
_Static_assert(sizeof(struct ig_unwind_rule) == 16, "ABI");

struct ig_unwind_key {
	u64 image; /* hash of pid, start and number of execs of the process */
	u64 pc;    /* the top bit is set for a return address, whose call is the instruction before it */
};
_Static_assert(sizeof(struct ig_unwind_key) == 16, "ABI");

/* ── Calls in flight ─────────────────────────────────────────────────────── */

struct ig_frame {
	u64 entry_ns; /* 0: the slot is free */
	u64 sp;
	u64 function; /* where its code begins: two libraries of a process may define the same one */
	u64 bytes;
	u64 handle;
	u64 stream;
	u64 aux;
	u64 out;
	u64 comm_ptr;
	u64 comm_hash;
	u64 count;
	u64 seq;
	s32 rank;
	s32 nranks;
	s32 peer;
	u32 descriptor;
	u32 grid_x;
	u16 grid_y;
	u16 grid_z;
	u16 block_x;
	u16 block_y;
	u16 block_z;
	s8 dtype;
	s8 redop;
	u16 op;
	u8 source;
	u8 flags;
	u8 copy;      /* 1: a copy; 2: inside of one; 0: neither */
	u8 has_inner; /* it called a function of the same operation, whose return comes and means nothing */
	u16 n_jumps;  /* returns that will come for such functions to which it jumped */
	/* Where the caller's frame begins, for whoever reads the stack while the call has not returned; 0: not kept. */
	u64 return_pc;
	u64 bp;
};
_Static_assert(sizeof(struct ig_frame) == 152, "ABI");

/* What a probed thread is doing: a stack of calls that have not returned. */
struct ig_thread {
	u32 pid;
	u32 depth;
	s32 device;
	u32 group_depth;
	u32 group_id;
	u32 reserved;
	u64 pointer; /* pthread_self(); 0 where it cannot be read */
	struct ig_frame frames[IG_MAX_DEPTH];
};
_Static_assert(sizeof(struct ig_thread) == 32 + 8 * 152, "ABI");

/* A call whose thread ended before it returned. */
struct ig_unfinished {
	struct ig_header header; /* mono_ns: entry */
	u64 ended_ns;
	u64 cgroup_id;
	u32 pid;
	u32 tid;
	s32 device;
	u32 group_id;
	u32 depth; /* as in ig_call */
	u32 reserved;
	char comm[IG_COMM_LEN];
	struct ig_frame frame;
};
_Static_assert(sizeof(struct ig_unfinished) == 72 + 152, "ABI");

/* ── Descriptors: what a probed function's arguments mean ────────────────── */

enum ig_act {
	IG_ACT_NONE = 0,
	IG_ACT_OUT = 1,        /* on success the handle is read through the out pointer */
	IG_ACT_ALLOC = 2,      /* as OUT, and the size is remembered under the handle */
	IG_ACT_FREE = 3,       /* bytes are those remembered */
	IG_ACT_SET_DEVICE = 4, /* on success the thread's device becomes aux */
	IG_ACT_COMM_INIT = 5,
	IG_ACT_COMM_INIT_ALL = 6,
	IG_ACT_COMM_SPLIT = 7,
	IG_ACT_COMM_END = 8,
	IG_ACT_COLLECTIVE = 9,
	IG_ACT_P2P = 10,
	IG_ACT_GROUP_START = 11,
	IG_ACT_GROUP_END = 12,
	IG_ACT_COMM_RANK = 13, /* a getter told the rank */
	IG_ACT_COMM_COUNT = 14,
	IG_ACT_OPEN_CONTEXT = 15, /* as OUT, and the context is of device aux */
	IG_ACT_GLOO_GROUP = 16, /* a process group is made: contexts that are connected meanwhile are its communicator */
	/* These four leave no record. */
	IG_ACT_GLOO_CONNECT = 17,
	IG_ACT_GLOO_CLOSE = 18,  /* a context ends */
	IG_ACT_GLOO_CAUGHT = 19, /* an exception was caught: C++ calls below this frame have been left by it */
	IG_ACT_GLOO_NEXT = 20,   /* a group numbers its next collective */
	IG_ACT_SET_CONTEXT = 21, /* on success the thread's device becomes that of the context */
	/* Counted by direction too, unless another copy made it; from here on act - IG_ACT_COPY is a cudaMemcpyKind. */
	IG_ACT_COPY = 32, /* the kind is aux */
	IG_ACT_COPY_H2D = 33,
	IG_ACT_COPY_D2H = 34,
	IG_ACT_COPY_D2D = 35,
	IG_ACT_COPY_DEFAULT = 36,
};

enum ig_role {
	IG_ARG_SIZE0, /* sizes are multiplied */
	IG_ARG_SIZE1,
	IG_ARG_SIZE2,
	IG_ARG_HANDLE,
	IG_ARG_STREAM,
	IG_ARG_AUX,
	IG_ARG_OUT,
	IG_ARG_COMM,
	IG_ARG_COUNT,
	IG_ARG_DTYPE,
	IG_ARG_REDOP,
	IG_ARG_PEER,
	IG_ARG_RANK,
	IG_ARG_NRANKS,
	IG_ARG_ID, /* address of the 128-byte unique id */
	IG_ARG_GRID_X,
	IG_ARG_GRID_Y,
	IG_ARG_GRID_Z,
	IG_ARG_BLOCK_X,
	IG_ARG_BLOCK_Y,
	IG_ARG_BLOCK_Z,
	IG_ARG_COLOR,
	IG_ARG_TAG, /* number of a collective, from 0, as every member counts */
	IG_N_ROLES = 24,
};

/* How to fetch one argument; 0 means that the function has none.
 *   bits 0-4   1..8 integer register, 9..31 eight-byte stack slot
 *   bit  5     32-bit value, sign extended
 *   bit  6     the upper half of a 64-bit register
 *   bit  7     the argument is a pointer: read the value it points to
 *   bit  8     the address of the stack slot itself (a structure passed by value in memory)
 *   bits 9-15  with bit 7: offset of the field in units of four bytes
 */
enum ig_selector {
	IG_SEL_PLACE = 0x1f,
	IG_SEL_32 = 0x20,
	IG_SEL_HIGH = 0x40,
	IG_SEL_DEREF = 0x80,
	IG_SEL_ADDRESS = 0x100,
	IG_SEL_OFFSET_SHIFT = 9,
};

struct ig_descriptor {
	u16 op;
	u16 pending_rc; /* a non-zero return code that is not an error (ingero.model.operations); 0: none */
	u8 source;
	u8 act;
	u8 needs_return;  /* 0: entry-only, half the cost */
	u8 is_collective; /* record is ig_collective */
	u16 args[IG_N_ROLES];
};
_Static_assert(sizeof(struct ig_descriptor) == 56, "ABI");

struct ig_handle_key {
	u64 handle;
	u32 pid;
	u32 reserved;
};
_Static_assert(sizeof(struct ig_handle_key) == 16, "ABI");

struct ig_communicator {
	u64 hash;
	u64 seq; /* collectives so far */
	u64 n_splits;
	u64 created_ns;
	s32 rank;
	s32 nranks;
	s32 device;
	u32 reserved;
};
_Static_assert(sizeof(struct ig_communicator) == 48, "ABI");

#endif
