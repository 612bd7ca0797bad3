/* Victims of the OOM killer; with a filter those that are watched. An object of its own: the tracepoint's arguments changed in Linux 6.8. */
#include "ingero/host.h"

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 64 << 10);
} victims SEC(".maps");

/* TP_PROTO(struct task_struct *task, uid_t uid), commit 72ba14deb40a ("mm: update mark_victim tracepoints fields"). */
SEC("tp_btf/mark_victim")
int mark_victim(u64 *ctx)
{
	struct task_struct *task = (struct task_struct *)ctx[0];
	struct ig_process *record;

	if (!is_watched_task(task))
		return 0;
	record = bpf_ringbuf_reserve(&victims, sizeof(*record), 0);
	if (!record) {
		count_lost(IG_KIND_PROCESS);
		return 0;
	}
	set_header(&record->header, IG_KIND_PROCESS, sizeof(*record), bpf_ktime_get_ns());
	record->cgroup_id = cgroup_of(task);
	record->pid = task->tgid;
	record->other_pid = bpf_get_current_pid_tgid() >> 32; /* whose allocation it was */
	record->uid = task->cred->uid.val;
	record->exit_code = 0;
	record->event = IG_PROCESS_OOM;
	__builtin_memset(record->reserved, 0, sizeof(record->reserved));
	bpf_probe_read_kernel(record->comm, sizeof(record->comm), task->comm);
	bpf_ringbuf_submit(record, 0);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
