/* Why threads of GPU processes were off the CPU, for how long, and who had it instead. */
#include "ingero/host.h"

/* Threads that are off the CPU now, by tid. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(max_entries, 65536);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct ig_departure);
} departures SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 2 << 20);
} off_cpus SEC(".maps");

/* include/linux/sched.h; EXIT_* are kept in the same word. */
enum {
	TASK_RUNNING = 0,
	TASK_INTERRUPTIBLE = 1,
	TASK_UNINTERRUPTIBLE = 2,
	TASK_STOPPED = 4,
	TASK_TRACED = 8,
	DEAD = 0xf0,
	TASK_FROZEN = 0x8000, /* Linux 6.1 */
};

/* Before Linux 6.1, beside TASK_UNINTERRUPTIBLE; since then of kernel threads alone, if of any. */
enum { PF_FROZEN = 0x10000 };

/* task->frozen; 0 on a kernel without cgroups. */
INLINE u64 read_frozen(struct task_struct *task)
{
	u64 word = 0;

	if (!FIELD_INFO(task->frozen, FIELD_EXISTS))
		return 0;
	bpf_probe_read_kernel(&word, FIELD_INFO(task->frozen, FIELD_BYTE_SIZE),
			      (void *)task + FIELD_INFO(task->frozen, FIELD_BYTE_OFFSET));
	return word << FIELD_INFO(task->frozen, FIELD_LSHIFT) >> FIELD_INFO(task->frozen, FIELD_RSHIFT);
}

/* Whether the freezer of its cgroup holds it: version 1 as when the machine is suspended, version 2 as asleep. */
INLINE bool is_frozen(struct task_struct *task, u32 state)
{
	if (state & TASK_FROZEN)
		return 1;
	if (state & TASK_UNINTERRUPTIBLE)
		return task->flags & PF_FROZEN;
	return read_frozen(task);
}

INLINE u8 reason_of(bool preempted, struct task_struct *task, u32 state)
{
	if (preempted || state == TASK_RUNNING)
		return IG_OFF_PREEMPTED;
	if (state & (TASK_STOPPED | TASK_TRACED) || is_frozen(task, state))
		return IG_OFF_STOPPED;
	return state & TASK_UNINTERRUPTIBLE ? IG_OFF_IO : IG_OFF_SLEEP;
}

INLINE void write_span(struct task_struct *task, const struct ig_departure *left, u64 now_ns)
{
	struct ig_count *count = count_of(task->tgid, IG_SOURCE_HOST, IG_HOST_SCHED_SWITCH);
	struct ig_settings *now = settings_now();
	struct finished span = {.end_ns = now_ns, .duration_ns = now_ns - left->left_ns};
	struct ig_off_cpu *record;
	struct ig_choice choice;

	if (!count || !now)
		return;
	ADD(count->entered, 1);
	span.flags = exact_flag(now, IG_SOURCE_HOST, IG_HOST_SCHED_SWITCH);
	choice = choose(count, now, &span);
	if (!choice.weight)
		return;
	record = bpf_ringbuf_reserve(&off_cpus, sizeof(*record), 0);
	if (!record) {
		choice_lost(count, choice);
		return;
	}
	set_header(&record->header, IG_KIND_OFF_CPU, sizeof(*record), left->left_ns);
	record->off_ns = now_ns - left->left_ns;
	record->wait_ns = left->reason == IG_OFF_PREEMPTED ? record->off_ns : left->woken_ns ? now_ns - left->woken_ns : 0;
	record->cgroup_id = cgroup_of(task);
	record->pid = task->tgid;
	record->tid = task->pid;
	record->other_pid = left->other_pid;
	record->waker_pid = left->waker_pid;
	record->cpu = bpf_get_smp_processor_id();
	record->reason = left->reason;
	record->flags = choice.flags;
	record->weight = choice.weight;
	bpf_probe_read_kernel(record->comm, sizeof(record->comm), task->comm);
	__builtin_memcpy(record->other_comm, left->other_comm, sizeof(record->other_comm));
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}

INLINE int on_switch(bool is_preempted, struct task_struct *prev, struct task_struct *next, u32 state)
{
	u32 prev_tid = prev->pid, next_tid = next->pid;
	u64 now_ns = bpf_ktime_get_ns();
	struct ig_departure left = {.left_ns = now_ns}, *came;

	came = bpf_map_lookup_elem(&departures, &next_tid);
	if (came) {
		write_span(next, came, now_ns);
		bpf_map_delete_elem(&departures, &next_tid);
	}
	if (!prev_tid || state & DEAD || !is_gpu_process(prev->tgid))
		return 0;
	left.other_pid = next->tgid;
	left.reason = reason_of(is_preempted, prev, state);
	bpf_probe_read_kernel(left.other_comm, sizeof(left.other_comm), next->comm);
	if (bpf_map_update_elem(&departures, &prev_tid, &left, BPF_ANY))
		count_lost(IG_KIND_OFF_CPU);
	return 0;
}

/* TP_PROTO(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state), Linux 5.18. */
SEC("tp_btf/sched_switch")
int sched_switch(u64 *ctx)
{
	return on_switch(ctx[0], (struct task_struct *)ctx[1], (struct task_struct *)ctx[2], ctx[3]);
}

/* The same without the last, before Linux 5.18. */
SEC("tp_btf/sched_switch")
int sched_switch_3(u64 *ctx)
{
	struct task_struct *prev = (struct task_struct *)ctx[1];

	return on_switch(ctx[0], prev, (struct task_struct *)ctx[2], prev->__state);
}

/* The departure of a task that is being woken; NULL for one that is not watched, or was woken before. */
INLINE struct ig_departure *asleep(struct task_struct *task)
{
	u32 tid = task->pid;
	struct ig_departure *left = bpf_map_lookup_elem(&departures, &tid);

	return left && !left->woken_ns ? left : 0;
}

/* Runs where the waker runs; sched_wakeup may run on the CPU that the woken task is queued on, whatever runs there. */
SEC("tp_btf/sched_waking")
int sched_waking(u64 *ctx)
{
	struct ig_departure *left = asleep((struct task_struct *)ctx[0]);

	if (left)
		left->waker_pid = bpf_get_current_pid_tgid() >> 32;
	return 0;
}

SEC("tp_btf/sched_wakeup")
int sched_wakeup(u64 *ctx)
{
	struct ig_departure *left = asleep((struct task_struct *)ctx[0]);

	if (left)
		left->woken_ns = bpf_ktime_get_ns();
	return 0;
}

SEC("tp_btf/sched_process_exit")
int sched_exit(u64 *ctx)
{
	u32 tid = ((struct task_struct *)ctx[0])->pid;

	bpf_map_delete_elem(&departures, &tid);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
