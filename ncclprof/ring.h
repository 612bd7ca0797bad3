/* What the plug-in tells an agent: a file of fixed size that is mapped here and read there (docs/specs/nccl-ring.md).
 *
 * The writer never looks at a reader. A slot is written again after N_RECORDS more records, and a reader tells by `head` how
 * many it missed. Nothing here takes a lock or enters the kernel once the file is mapped.
 */
#ifndef INGERO_NCCLPROF_RING_H
#define INGERO_NCCLPROF_RING_H

#include "api.h"

#include <stdatomic.h>

#define RING_MAGIC 0x314c43434e474e49ull /* "INGNCCL1" */
#define WRITING (1ull << 63)
enum { RING_VERSION = 1, N_RECORDS = 4096, N_COMMS = 128 };

/* One finished collective. `stamp` is its number from 1, with WRITING while the rest is being written. */
struct record {
	_Atomic u64 stamp;
	u64 comm;
	u64 seq; /* from 1, counted per communicator as collectives are enqueued */
	u64 n_bytes; /* count times type size; all ones when the type is not known */
	u64 host_start_ns, host_stop_ns; /* CLOCK_MONOTONIC: NCCL began and ended to enqueue it */
	u64 host_seen_ns; /* CLOCK_MONOTONIC: NCCL's thread told of the last channel's end */
	u64 gpu_start_ns, gpu_stop_ns; /* the device's global timer: first channel began, last one ended */
	int32_t rank, n_ranks;
	u32 op; /* enum op */
	u32 n_channels;
};
_Static_assert(sizeof(struct record) == 88, "spec");

/* Where this process is on one communicator. */
struct place {
	_Atomic u64 comm;
	_Atomic u64 entered, left; /* last sequence number enqueued, and known to have ended; 0 for none */
	_Atomic u64 entry_ns; /* CLOCK_MONOTONIC, of the last one entered */
	_Atomic int32_t rank, n_ranks;
	_Atomic u32 op;
	_Atomic u32 is_live;
	u64 reserved[2];
};
_Static_assert(sizeof(struct place) == 64, "spec");

struct ring {
	u64 magic;
	u32 version, n_records, record_bytes, n_comms;
	u32 pid; /* as the process itself sees it */
	u32 api; /* version of NCCL's interface that is in use */
	u64 began_ns; /* CLOCK_MONOTONIC */
	_Atomic u64 head; /* records begun so far */
	_Atomic u64 n_crowded; /* collectives not followed: too many at once */
	_Atomic u64 n_unended; /* whose channels were not all told of */
	_Atomic u64 n_untimed; /* that told of no channel */
	_Atomic u64 n_stray; /* events of no collective that is followed */
	_Atomic u64 n_unplaced; /* communicators for which every place was in use */
	u64 reserved[5];
	struct place places[N_COMMS];
	struct record records[N_RECORDS];
};
_Static_assert(offsetof(struct ring, head) == 40, "spec");
_Static_assert(offsetof(struct ring, places) == 128, "spec");
_Static_assert(offsetof(struct ring, records) == 128 + 64 * N_COMMS, "spec");

/* Values of ingero.model.collectives.CollectiveOp. */
enum op {
	OP_UNKNOWN = 0,
	OP_ALL_REDUCE = 1,
	OP_ALL_GATHER = 2,
	OP_REDUCE_SCATTER = 3,
	OP_BROADCAST = 4,
	OP_REDUCE = 5,
	OP_ALL_TO_ALL = 9,
};

/* Make the process's ring; NULL with `why` when it cannot be had. Not thread safe. */
struct ring *ring_open(u32 api, const char **why);

/* Remove its file. A reader that has it open still reads what is in it. */
void ring_close(void);

/* A slot to fill; ring_publish makes it readable. NULL when another thread is still writing there: the number of the record
 * is then used up without one, which a reader counts. */
struct record *ring_claim(struct ring *ring, u64 *stamp);
void ring_publish(struct record *record, u64 stamp);

u64 now_ns(void);

#endif
