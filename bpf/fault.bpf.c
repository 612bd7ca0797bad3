/* Major page faults of GPU processes: memory that had to be read from a disk before the thread could go on. */
#include "ingero/host.h"

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 256 << 10);
} faults SEC(".maps");

/* When a thread entered the fault that it is in. With the task, because every minor fault passes here too. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_TASK_STORAGE);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, s32);
	MAP_TYPE(value, u64);
} faulting SEC(".maps");

/* PERF_COUNT_SW_PAGE_FAULTS: every fault, when it begins. */
SEC("perf_event")
int fault_begin(void *ctx)
{
	u64 *began;

	(void)ctx;
	if (!is_gpu_process(bpf_get_current_pid_tgid() >> 32))
		return 0;
	began = bpf_task_storage_get(&faulting, bpf_get_current_task_btf(), 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (began)
		*began = bpf_ktime_get_ns();
	return 0;
}

/* PERF_COUNT_SW_PAGE_FAULTS_MAJ: one that had to wait for a disk, when it ends. */
SEC("perf_event")
int fault_end(void *ctx)
{
	struct span fault = {.source = IG_SOURCE_HOST, .op = IG_HOST_PAGE_FAULT};
	u64 *began;

	(void)ctx;
	if (!is_gpu_process(bpf_get_current_pid_tgid() >> 32))
		return 0;
	began = bpf_task_storage_get(&faulting, bpf_get_current_task_btf(), 0, 0);
	if (!began || !*began)
		return 0;
	fault.start_ns = *began;
	fault.duration_ns = bpf_ktime_get_ns() - *began;
	*began = 0;
	COUNT_SPAN(faults, &fault);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
