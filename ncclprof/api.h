/* The part of NCCL's public profiler plug-in interface that we use: versions 4, 5 and 6.
 *
 * Source: NCCL's documentation of the interface (plugins/profiler/README.md, in older releases ext-profiler/README.md) and
 * its published versioned headers profiler_v4.h (since NCCL 2.27), profiler_v5.h (since 2.28) and profiler_v6.h. This is an ABI:
 * names are ours, the order and width of every field are theirs, and the assertions below say where each must lie. NCCL
 * looks for the newest symbol that it knows, then for older ones.
 *
 * In all three versions the fields that we read lie at the same offsets; what differs is the width of the type (one byte in
 * version 4, whose neighbours may hold anything) and the arguments of init.
 */
#ifndef INGERO_NCCLPROF_API_H
#define INGERO_NCCLPROF_API_H

#include <stddef.h>
#include <stdint.h>

typedef uint32_t u32;
typedef uint64_t u64;

enum { NCCL_SUCCESS = 0 };

/* Bits of the activation mask, and the type of an event. */
enum {
	EVENT_GROUP = 1 << 0,
	EVENT_COLLECTIVE = 1 << 1,
	EVENT_KERNEL_CHANNEL = 1 << 6,
};

/* The one state that we are told: the kernel of a channel ended. */
enum { STATE_KERNEL_CHANNEL_STOP = 22 };

/* ncclDebugLogLevel and ncclDebugLogSubSys of the logger that init is given. */
enum { LOG_WARN = 2, LOG_INFO = 3, LOG_INIT = 1 };

typedef void (*log_t)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

struct collective_event {
	u64 seq; /* NCCL's own: counted per function, so not per communicator */
	const char *function;
	const void *send;
	void *receive;
	size_t count;
	int root;
	const char *type;
	uint8_t n_channels;
	uint8_t n_warps;
	const char *algorithm;
	const char *protocol;
};

struct channel_event {
	uint8_t channel;
	u64 gpu_ns; /* start, of the device's global timer */
};

struct event {
	union {
		uint8_t type_v4;
		u64 type; /* version 5 and later */
	};
	void *parent;
	int rank;
	union {
		struct collective_event collective;
		struct channel_event channel;
	};
};

union state {
	struct {
		u64 gpu_ns; /* end, of the device's global timer */
	} channel;
};

struct profiler_v4 {
	const char *name;
	int (*init)(void **context, int *mask, const char *comm_name, u64 comm, int n_nodes, int n_ranks,
		    int rank, log_t log);
	int (*start)(void *context, void **handle, struct event *event);
	int (*stop)(void *handle);
	int (*record)(void *handle, int state, union state *told);
	int (*finalize)(void *context);
};

struct profiler_v5 {
	const char *name;
	int (*init)(void **context, u64 comm, int *mask, const char *comm_name, int n_nodes, int n_ranks,
		    int rank, log_t log);
	int (*start)(void *context, void **handle, struct event *event);
	int (*stop)(void *handle);
	int (*record)(void *handle, int state, union state *told);
	int (*finalize)(void *context);
};

#define AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #field)
AT(struct event, parent, 8);
AT(struct event, rank, 16);
AT(struct event, collective.seq, 24);
AT(struct event, collective.function, 32);
AT(struct event, collective.count, 56);
AT(struct event, collective.root, 64);
AT(struct event, collective.type, 72);
AT(struct event, collective.n_channels, 80);
AT(struct event, collective.n_warps, 81);
AT(struct event, collective.algorithm, 88);
AT(struct event, collective.protocol, 96);
AT(struct event, channel.channel, 24);
AT(struct event, channel.gpu_ns, 32);
AT(union state, channel.gpu_ns, 0);
AT(struct profiler_v5, finalize, 40);
#undef AT

#endif
