/* Block requests: time in the queue, time in the device, and who asked.
 *
 * With a filter only requests that a watched task made itself: what kernel threads write back later is nobody's in
 * particular. A request of somebody else is remembered too, as one to leave out: a watched task may be the one that
 * hands it to the device.
 */
#include "ingero/host.h"

struct request_start {
	u64 insert_ns;
	u64 issue_ns;
	u64 cgroup_id;
	u64 sector;
	u32 pid;
	u32 bytes;
	u32 device;
	u32 flags;
	char comm[IG_COMM_LEN];
	u32 is_left_out; /* the user did not ask for its owner */
	u32 reserved;
};

/* Requests on their way, by the address of the kernel's request. Not an LRU: the oldest are those that a slow disk keeps. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(max_entries, 16384);
	MAP_TYPE(key, u64);
	MAP_TYPE(value, struct request_start);
} requests SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 1 << 20);
} blocks SEC(".maps");

/* include/linux/blk_types.h enum req_op: the low eight bits of cmd_flags. */
enum { REQ_OP_READ = 0, REQ_OP_WRITE = 1, REQ_OP_FLUSH = 2, REQ_OP_DISCARD = 3 };

INLINE void describe(struct request *request, struct request_start *start)
{
	struct gendisk *disk = request->q->disk;

	start->sector = request->__sector;
	start->bytes = request->__data_len;
	start->flags = request->cmd_flags;
	start->device = disk ? (u32)disk->major << 20 | (u32)disk->first_minor : 0;
	start->pid = bpf_get_current_pid_tgid() >> 32;
	start->cgroup_id = bpf_get_current_cgroup_id();
	start->is_left_out = !is_watched_task(bpf_get_current_task_btf());
	bpf_get_current_comm(start->comm, sizeof(start->comm));
}

INLINE void remember(u64 request, const struct request_start *start)
{
	struct ig_losses *lost;

	if (bpf_map_update_elem(&requests, &request, start, BPF_ANY) && (lost = losses_here()))
		ADD(lost->requests_full, 1);
}

SEC("tp_btf/block_rq_insert")
int block_insert(u64 *ctx)
{
	struct request_start start = {.insert_ns = bpf_ktime_get_ns()};

	describe((struct request *)ctx[0], &start);
	remember(ctx[0], &start);
	return 0;
}

/* The bytes of this one are another's now, which is counted alone; the kernel uses its address for a new request. */
SEC("tp_btf/block_rq_merge")
int block_merge(u64 *ctx)
{
	u64 key = ctx[0];

	bpf_map_delete_elem(&requests, &key);
	return 0;
}

SEC("tp_btf/block_rq_issue")
int block_issue(u64 *ctx)
{
	struct request_start start = {}, *known;
	u64 key = ctx[0], now_ns = bpf_ktime_get_ns();

	known = bpf_map_lookup_elem(&requests, &key);
	if (known) { /* queued by its owner; issued perhaps by a kernel thread, or again after a requeue */
		struct request *request = (struct request *)ctx[0];

		if (!known->issue_ns) { /* others were merged into it while it was queued */
			known->sector = request->__sector;
			known->bytes = request->__data_len;
		}
		known->issue_ns = now_ns;
		return 0;
	}
	start.issue_ns = now_ns;
	describe((struct request *)ctx[0], &start);
	remember(key, &start);
	return 0;
}

INLINE enum ig_io_op op_of(u32 flags)
{
	switch (flags & 0xff) {
	case REQ_OP_READ:
		return IG_IO_READ;
	case REQ_OP_WRITE:
		return IG_IO_WRITE;
	case REQ_OP_DISCARD:
		return IG_IO_DISCARD;
	case REQ_OP_FLUSH:
		return IG_IO_FLUSH;
	default:
		return IG_IO_OTHER;
	}
}

INLINE void write_request(const struct request_start *start, u64 now_ns, s32 error)
{
	u16 op = op_of(start->flags);
	struct ig_count *count = count_of(start->pid, IG_SOURCE_IO, op);
	struct ig_settings *now = settings_now();
	struct finished request = {
		.end_ns = now_ns,
		.duration_ns = now_ns - start->issue_ns,
		.bytes = start->bytes,
		.flags = error ? IG_FLAG_ERROR : 0,
	};
	u64 began_ns = start->insert_ns ? start->insert_ns : start->issue_ns;
	struct ig_block *record;
	struct ig_choice choice;

	if (!count || !now)
		return;
	ADD(count->entered, 1);
	request.flags |= exact_flag(now, IG_SOURCE_IO, op);
	if (now_ns - began_ns >= IG_LONG_REQUEST_NS)
		request.flags |= IG_FLAG_LARGE;
	choice = choose(count, now, &request);
	if (!choice.weight)
		return;
	record = bpf_ringbuf_reserve(&blocks, sizeof(*record), 0);
	if (!record) {
		choice_lost(count, choice);
		return;
	}
	set_header(&record->header, IG_KIND_BLOCK, sizeof(*record), start->issue_ns);
	record->queue_ns = start->insert_ns ? start->issue_ns - start->insert_ns : 0;
	record->device_ns = now_ns - start->issue_ns;
	record->sector = start->sector;
	record->cgroup_id = start->cgroup_id;
	record->bytes = start->bytes;
	record->device = start->device;
	record->pid = start->pid;
	record->error = error;
	record->op = op;
	record->flags = choice.flags;
	record->reserved = 0;
	record->weight = choice.weight;
	__builtin_memcpy(record->comm, start->comm, sizeof(record->comm));
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}

/* TP_PROTO(struct request *rq, blk_status_t error, unsigned int nr_bytes); the last part of a request ends it. */
SEC("tp_btf/block_rq_complete")
int block_complete(u64 *ctx)
{
	struct request *request = (struct request *)ctx[0];
	struct request_start *known;
	u64 key = ctx[0];

	known = bpf_map_lookup_elem(&requests, &key);
	if (!known || !known->issue_ns || request->__data_len > (u32)ctx[2])
		return 0;
	if (!known->is_left_out)
		write_request(known, bpf_ktime_get_ns(), (s32)ctx[1]);
	bpf_map_delete_elem(&requests, &key);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
