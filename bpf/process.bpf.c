/* Processes that begin, end and replace their image. Keeps the pid filter and the thread table true to them. */
#include "ingero/host.h"

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 256 << 10);
} processes SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 1 << 20);
} unfinished SEC(".maps");

struct ended {
	u64 start_ns; /* of the thread group's leader, since boot: a number is used again, a number and this are not */
	u32 pid;
	u32 reserved;
};

/* Processes whose end was recorded lately. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_LRU_HASH);
	MAP_UINT(max_entries, 4096);
	MAP_TYPE(key, struct ended);
	MAP_TYPE(value, u8);
} ends SEC(".maps");

enum { EEXIST = 17 };

INLINE void write_event(struct task_struct *task, u16 event, u32 other_pid)
{
	struct ig_process *record = bpf_ringbuf_reserve(&processes, sizeof(*record), 0);

	if (!record) {
		count_lost(IG_KIND_PROCESS);
		return;
	}
	set_header(&record->header, IG_KIND_PROCESS, sizeof(*record), bpf_ktime_get_ns());
	record->cgroup_id = cgroup_of(task);
	record->pid = task->tgid;
	record->other_pid = other_pid;
	record->uid = task->cred->uid.val;
	record->exit_code = task->exit_code;
	record->event = event;
	__builtin_memset(record->reserved, 0, sizeof(record->reserved));
	bpf_probe_read_kernel(record->comm, sizeof(record->comm), task->comm);
	bpf_ringbuf_submit(record, 0);
}

/* Whether the user named this process, or it makes GPU calls. */
INLINE bool concerns_us(struct task_struct *task)
{
	struct ig_settings *now = settings_now();

	return is_gpu_process(task->tgid) || (now && now->filter && is_watched_task(task));
}

SEC("tp_btf/sched_process_fork")
int process_fork(u64 *ctx)
{
	struct task_struct *parent = (struct task_struct *)ctx[0], *child = (struct task_struct *)ctx[1];
	u32 parent_pid = parent->tgid, child_pid = child->tgid;
	struct ig_python *python;
	u8 yes = 1;

	if (child_pid != (u32)child->pid) /* a thread */
		return 0;
	if (bpf_map_lookup_elem(&filter_pids, &parent_pid))
		add_process(&filter_pids, child_pid, &yes);
	if ((python = bpf_map_lookup_elem(&pythons, &parent_pid))) /* its memory is a copy */
		add_process(&pythons, child_pid, python);
	if (concerns_us(parent))
		write_event(child, IG_PROCESS_FORK, parent_pid);
	return 0;
}

/* TP_PROTO(struct task_struct *p, pid_t old_pid, struct linux_binprm *bprm); a thread that is not the first becomes the first. */
SEC("tp_btf/sched_process_exec")
int process_exec(u64 *ctx)
{
	struct task_struct *task = (struct task_struct *)ctx[0];
	u32 tid = ctx[1], pid = task->tgid;

	bpf_map_delete_elem(&threads, &tid); /* its calls went with the old image */
	bpf_map_delete_elem(&pythons, &pid);
	if (concerns_us(task))
		write_event(task, IG_PROCESS_EXEC, 0);
	return 0;
}

/* The calls that a thread which ends has not returned from. */
INLINE void write_unfinished(struct task_struct *task, const struct ig_thread *thread)
{
	u64 now_ns = bpf_ktime_get_ns();
	struct ig_unfinished *record;

	for (u32 i = 0; i < IG_MAX_DEPTH; i++) {
		if (i >= thread->depth || !thread->frames[i].entry_ns)
			break;
		record = bpf_ringbuf_reserve(&unfinished, sizeof(*record), 0);
		if (!record) {
			count_lost(IG_KIND_PROCESS);
			return;
		}
		set_header(&record->header, IG_KIND_UNFINISHED, sizeof(*record), thread->frames[i].entry_ns);
		record->ended_ns = now_ns;
		record->cgroup_id = cgroup_of(task);
		record->pid = thread->pid;
		record->tid = task->pid;
		record->device = thread->device;
		record->group_id = thread->frames[i].flags & IG_FLAG_GROUPED ? thread->group_id : 0;
		record->depth = i;
		record->reserved = 0;
		bpf_probe_read_kernel(record->comm, sizeof(record->comm), task->comm);
		__builtin_memcpy(&record->frame, &thread->frames[i], sizeof(record->frame));
		bpf_ringbuf_submit(record, 0);
	}
}

/* Threads that end together have all counted themselves out of `live` before the first comes here. */
INLINE bool is_first_end(struct task_struct *task)
{
	struct ended ended = {.start_ns = task->group_leader->start_boottime, .pid = task->tgid};
	u8 yes = 1;

	return bpf_map_update_elem(&ends, &ended, &yes, BPF_NOEXIST) != -EEXIST;
}

SEC("tp_btf/sched_process_exit")
int process_exit(u64 *ctx)
{
	struct task_struct *task = (struct task_struct *)ctx[0];
	u32 tid = task->pid, pid = task->tgid;
	struct ig_thread *thread = bpf_map_lookup_elem(&threads, &tid);
	bool is_told;

	if (thread && settings_now())
		write_unfinished(task, thread);
	bpf_map_delete_elem(&threads, &tid);
	if (task->signal->live.counter) /* other threads live on */
		return 0;
	is_told = concerns_us(task);
	bpf_map_delete_elem(&filter_pids, &pid);
	bpf_map_delete_elem(&gpu_pids, &pid);
	bpf_map_delete_elem(&pythons, &pid);
	if (is_told && is_first_end(task)) /* last: the reader, when it wakes, sees who is left */
		write_event(task, IG_PROCESS_EXIT, 0);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
