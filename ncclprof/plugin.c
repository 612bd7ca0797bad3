/* libnccl-profiler-ingero.so: device times of collectives, told to an agent and never waited for.
 *
 * NCCL loads it when NCCL_PROFILER_PLUGIN names it. It asks for collectives and for the channels of their kernels, which bear
 * times of the device's global timer. A collective is over when NCCL has enqueued it and told of the end of each of its
 * channels; it then goes into the ring. Events come from any thread of NCCL: everything after init is atomic, and nothing
 * is allocated, locked or asked of the kernel.
 */
#include "ring.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { N_OPEN = 4096, TRIES = 1024, OLD = 16 };
_Static_assert(N_OPEN <= 1 << 16, "a handle has 16 bits for it");

/* A collective that is under way. `state` is its generation in the upper half, which makes handles of an earlier use
 * void, and in the lower half how many ends are still to come: one for each channel and one of NCCL's enqueueing. 0 is
 * free; FILLING and TELLING are for the thread alone that made it so, before the first and after the last end. */
enum { FILLING = 0x20000000, TELLING = 0x40000000, IS_OURS = FILLING | TELLING };

struct open {
	_Atomic u64 state;
	_Atomic u64 gpu_start_ns, gpu_stop_ns, host_stop_ns;
	struct place *place;
	void *context;
	u64 comm, seq, n_bytes, host_start_ns;
	int32_t rank, n_ranks;
	u32 op, n_channels;
};

struct context {
	struct place *place;
	u64 comm;
	_Atomic u64 seq;
	int32_t rank, n_ranks;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* init and finalize alone */
static struct ring *_Atomic ring;
static unsigned n_contexts;
static struct open opened[N_OPEN];
static _Atomic u64 n_opened;

/* ── Handles: never followed as pointers, so one that is used too late does no harm ─ */

enum { IS_CHANNEL = 1 };

/* NCCL 2.27, which alone has version 4 as its newest, tells of a collective only where its group has a handle. */
#define GROUP_HANDLE ((void *)8)

static void *build_handle(u64 generation, u64 index, u64 kind)
{
	return (void *)(uintptr_t)(generation << 32 | index << 8 | kind << 1 | 1);
}

static struct open *find_open(const void *handle, u64 *generation)
{
	u64 value = (uintptr_t)handle;
	struct open *found = &opened[value >> 8 & (N_OPEN - 1)];

	*generation = value >> 32;
	if (handle && atomic_load(&found->state) >> 32 == *generation && (u32)atomic_load(&found->state))
		return found;
	return NULL;
}

/* ── Meaning of what NCCL says ───────────────────────────────────────────── */

static u32 read_op(const char *function)
{
	static const struct {
		const char *name;
		u32 op;
	} known[] = {
		{"AllReduce", OP_ALL_REDUCE},	  {"AllGather", OP_ALL_GATHER},
		{"ReduceScatter", OP_REDUCE_SCATTER}, {"Broadcast", OP_BROADCAST},
		{"Reduce", OP_REDUCE},		  {"AlltoAll", OP_ALL_TO_ALL},
	};

	for (size_t i = 0; function && i < sizeof(known) / sizeof(*known); i++)
		if (!strcmp(function, known[i].name))
			return known[i].op;
	return OP_UNKNOWN;
}

/* Bytes of an element: the first number in the name of its type is its bits, as in ncclFloat32 and ncclFloat8e4m3. */
static u64 read_type_bytes(const char *type)
{
	u64 bits = 0;

	if (!type)
		return 0;
	type += strcspn(type, "0123456789");
	while (*type >= '0' && *type <= '9')
		bits = bits * 10 + (u64)(*type++ - '0');
	return bits <= 1024 ? bits / 8 : 0;
}

static void raise_to(_Atomic u64 *place, u64 value)
{
	u64 seen = atomic_load(place);

	while (seen < value && !atomic_compare_exchange_weak(place, &seen, value))
		;
}

static void lower_to(_Atomic u64 *place, u64 value)
{
	u64 seen = atomic_load(place);

	while (seen > value && !atomic_compare_exchange_weak(place, &seen, value))
		;
}

/* ── A collective's life ─────────────────────────────────────────────────── */

static void tell(struct ring *to, struct open *done)
{
	u64 stamp;
	struct record *record;

	if (!done->n_channels) { /* so nobody knows when it ended */
		atomic_fetch_add(&to->n_untimed, 1);
		return;
	}
	if (done->place)
		raise_to(&done->place->left, done->seq);
	record = ring_claim(to, &stamp);
	if (!record)
		return;
	record->comm = done->comm;
	record->seq = done->seq;
	record->n_bytes = done->n_bytes;
	record->host_start_ns = done->host_start_ns;
	record->host_stop_ns = atomic_load(&done->host_stop_ns);
	record->host_seen_ns = now_ns();
	record->gpu_start_ns = atomic_load(&done->gpu_start_ns);
	record->gpu_stop_ns = atomic_load(&done->gpu_stop_ns);
	record->rank = done->rank;
	record->n_ranks = done->n_ranks;
	record->op = done->op;
	record->n_channels = done->n_channels;
	ring_publish(record, stamp);
}

/* Take an entry that is free, or whose collective NCCL has not ended while OLD rounds of the table were begun; NULL when
 * all that are near are in use. */
static struct open *claim_open(struct ring *to, u64 *generation, u64 *index)
{
	for (int i = 0; i < TRIES; i++) {
		u64 number = atomic_fetch_add(&n_opened, 1), state;
		struct open *entry = &opened[*index = number % N_OPEN];

		/* From 1; two equal ones are 2^43 collectives apart. */
		*generation = number / N_OPEN % 0x7fffffff + 1;
		state = atomic_load(&entry->state);
		if ((u32)state && *generation - (state >> 32) < OLD)
			continue;
		if (!atomic_compare_exchange_strong(&entry->state, &state, *generation << 32 | FILLING))
			continue;
		if ((u32)state)
			atomic_fetch_add(&to->n_unended, 1);
		return entry;
	}
	atomic_fetch_add(&to->n_crowded, 1);
	return NULL;
}

static void start_collective(struct ring *to, struct context *context, void **handle, const struct event *event)
{
	const struct collective_event *told = &event->collective;
	u64 host_ns = now_ns(), seq = atomic_fetch_add(&context->seq, 1) + 1, size, generation, index;
	struct open *entry;

	if (context->place) {
		atomic_store(&context->place->op, read_op(told->function));
		atomic_store(&context->place->entry_ns, host_ns);
		raise_to(&context->place->entered, seq);
	}
	entry = claim_open(to, &generation, &index);
	if (!entry)
		return;
	entry->place = context->place;
	entry->context = context;
	entry->comm = context->comm;
	entry->rank = context->rank;
	entry->n_ranks = context->n_ranks;
	entry->seq = seq;
	size = read_type_bytes(told->type);
	if (!size || __builtin_mul_overflow(told->count, size, &entry->n_bytes))
		entry->n_bytes = ~0ull;
	entry->op = read_op(told->function);
	entry->n_channels = told->n_channels;
	entry->host_start_ns = host_ns;
	atomic_store(&entry->host_stop_ns, 0);
	atomic_store(&entry->gpu_start_ns, ~0ull);
	atomic_store(&entry->gpu_stop_ns, 0);
	atomic_store(&entry->state, generation << 32 | (told->n_channels + 1u));
	*handle = build_handle(generation, index, 0);
}

static void start_channel(struct ring *to, void **handle, const struct event *event)
{
	u64 generation;
	struct open *entry = find_open(event->parent, &generation);

	if (!event->parent)
		return; /* of a send or receive, which we do not follow */
	if (!entry) {
		atomic_fetch_add(&to->n_stray, 1);
		return;
	}
	lower_to(&entry->gpu_start_ns, event->channel.gpu_ns);
	*handle = build_handle(generation, (u64)(entry - opened), IS_CHANNEL);
}

/* One of the ends that were awaited; the last one tells of the collective and frees the entry. */
static void end_one(struct ring *to, struct open *entry, u64 generation)
{
	u64 state = atomic_load(&entry->state);

	do {
		if (state >> 32 != generation || !(u32)state || (u32)state & IS_OURS) {
			atomic_fetch_add(&to->n_stray, 1);
			return;
		}
	} while (!atomic_compare_exchange_weak(&entry->state, &state,
					       (u32)state == 1 ? generation << 32 | TELLING : state - 1));
	if ((u32)state == 1) {
		tell(to, entry);
		atomic_store(&entry->state, generation << 32);
	}
}

/* ── What NCCL calls ─────────────────────────────────────────────────────── */

static int start(void *context, void **handle, const struct event *event, u64 type)
{
	struct ring *to = atomic_load(&ring);

	*handle = NULL;
	if (!to || !context)
		return NCCL_SUCCESS;
	if (type == EVENT_COLLECTIVE)
		start_collective(to, context, handle, event);
	else if (type == EVENT_KERNEL_CHANNEL)
		start_channel(to, handle, event);
	return NCCL_SUCCESS;
}

static int start_v4(void *context, void **handle, struct event *event)
{
	int rc = start(context, handle, event, event->type_v4);

	if (event->type_v4 == EVENT_GROUP)
		*handle = GROUP_HANDLE;
	return rc;
}

static int start_v5(void *context, void **handle, struct event *event)
{
	return start(context, handle, event, event->type);
}

static int stop(void *handle)
{
	struct ring *to = atomic_load(&ring);
	u64 generation;
	struct open *entry = find_open(handle, &generation);

	if (!to || !handle || handle == GROUP_HANDLE)
		return NCCL_SUCCESS;
	if (!entry) {
		atomic_fetch_add(&to->n_stray, 1);
		return NCCL_SUCCESS;
	}
	if (!((uintptr_t)handle >> 1 & IS_CHANNEL))
		atomic_store(&entry->host_stop_ns, now_ns());
	end_one(to, entry, generation);
	return NCCL_SUCCESS;
}

static int record(void *handle, int state, union state *told)
{
	u64 generation;
	struct open *entry = find_open(handle, &generation);

	if (state == STATE_KERNEL_CHANNEL_STOP && entry && told && (uintptr_t)handle >> 1 & IS_CHANNEL)
		raise_to(&entry->gpu_stop_ns, told->channel.gpu_ns);
	return NCCL_SUCCESS;
}

/* A row of the ring's table; NULL when all are in use, and then no reader sees where this communicator stands. */
static struct place *claim_place(struct ring *in, const struct context *context)
{
	for (int i = 0; i < N_COMMS; i++) {
		struct place *place = &in->places[i];

		if (atomic_load(&place->is_live))
			continue;
		atomic_store(&place->comm, context->comm);
		atomic_store(&place->entered, 0);
		atomic_store(&place->left, 0);
		atomic_store(&place->entry_ns, 0);
		atomic_store(&place->rank, context->rank);
		atomic_store(&place->n_ranks, context->n_ranks);
		atomic_store(&place->op, OP_UNKNOWN);
		atomic_store(&place->is_live, 1);
		return place;
	}
	atomic_fetch_add(&in->n_unplaced, 1);
	return NULL;
}

static int init(struct context *like, void **context, int *mask, u32 api, log_t log)
{
	const char *why = "there is no memory";
	struct context *made = malloc(sizeof(*made));
	struct ring *to;

	*context = NULL;
	*mask = 0;
	pthread_mutex_lock(&lock);
	to = atomic_load(&ring);
	if (to && to->pid != (u32)getpid()) { /* we are a fork */
		ring_close();
		n_contexts = 0;
		to = NULL;
	}
	if (made && !to)
		atomic_store(&ring, to = ring_open(api, &why));
	if (made && to) {
		*made = *like;
		made->place = claim_place(to, made);
		n_contexts++;
		*context = made;
		*mask = EVENT_COLLECTIVE | EVENT_KERNEL_CHANNEL;
	}
	pthread_mutex_unlock(&lock);
	if (!*context) {
		free(made);
		if (log)
			log(LOG_WARN, LOG_INIT, __FILE__, __LINE__, "Ingero: collectives are not timed: %s", why);
	}
	return NCCL_SUCCESS; /* whatever becomes of us, NCCL goes on */
}

static int init_v4(void **context, int *mask, const char *comm_name, u64 comm, int n_nodes, int n_ranks, int rank,
		   log_t log)
{
	struct context like = {.comm = comm, .rank = rank, .n_ranks = n_ranks};

	(void)comm_name, (void)n_nodes;
	return init(&like, context, mask, 4, log);
}

static int init_v5(void **context, u64 comm, int *mask, const char *comm_name, int n_nodes, int n_ranks, int rank,
		   log_t log)
{
	struct context like = {.comm = comm, .rank = rank, .n_ranks = n_ranks};

	(void)comm_name, (void)n_nodes;
	return init(&like, context, mask, 5, log);
}

static int init_v6(void **context, u64 comm, int *mask, const char *comm_name, int n_nodes, int n_ranks, int rank,
		   log_t log)
{
	struct context like = {.comm = comm, .rank = rank, .n_ranks = n_ranks};

	(void)comm_name, (void)n_nodes;
	return init(&like, context, mask, 6, log);
}

/* What an aborted communicator left under way will not end any more. */
static void forget_opened(struct ring *to, const void *context)
{
	for (u64 i = 0; i < N_OPEN; i++) {
		u64 state = atomic_load(&opened[i].state);

		if ((u32)state && opened[i].context == context &&
		    atomic_compare_exchange_strong(&opened[i].state, &state, state >> 32 << 32))
			atomic_fetch_add(&to->n_unended, 1);
	}
}

static int finalize(void *told)
{
	struct context *context = told;
	struct ring *to;

	if (!context)
		return NCCL_SUCCESS;
	pthread_mutex_lock(&lock);
	to = atomic_load(&ring);
	if (to && to->pid == (u32)getpid()) {
		forget_opened(to, context);
		if (context->place)
			atomic_store(&context->place->is_live, 0);
		if (n_contexts && !--n_contexts) { /* NCCL may unload us now */
			atomic_store(&ring, NULL);
			ring_close();
		}
	}
	pthread_mutex_unlock(&lock);
	free(context);
	return NCCL_SUCCESS;
}

EXPORT const struct profiler_v4 ncclProfiler_v4 = {"Ingero", init_v4, start_v4, stop, record, finalize};
EXPORT const struct profiler_v5 ncclProfiler_v5 = {"Ingero", init_v5, start_v5, stop, record, finalize};
/* Version 6 adds events that we do not ask for. */
EXPORT const struct profiler_v5 ncclProfiler_v6 = {"Ingero", init_v6, start_v5, stop, record, finalize};
