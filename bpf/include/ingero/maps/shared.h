/* Maps that several objects use. The loader creates each once and hands the same one to every object. */
#ifndef INGERO_MAPS_SHARED_H
#define INGERO_MAPS_SHARED_H

#include "ingero/record.h"

/* To add to a number that other CPUs change at the same time. */
#define ADD(number, n) ((void)__sync_fetch_and_add(&(number), (n)))

struct {
	MAP_UINT(type, BPF_MAP_TYPE_ARRAY);
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct ig_settings);
} settings SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(max_entries, 16384);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, u8);
} filter_pids SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(max_entries, 4096);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, u64);
	MAP_TYPE(value, u8);
} filter_cgroups SEC(".maps");

/* Thread groups that made a probed call: the ones whose host events matter. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(max_entries, 16384);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, u64);
} gpu_pids SEC(".maps");

/* What every probed thread is doing now, by tid. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(max_entries, 65536);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct ig_thread);
} threads SEC(".maps");

/* One for all CPUs, and every change of it is atomic: of 256 CPUs one each would take 280 KiB for each operation of each process. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(max_entries, 16384);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, struct ig_count_key);
	MAP_TYPE(value, struct ig_count);
} counts SEC(".maps");

/* Processes with a Python interpreter that user space has checked. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(max_entries, 16384);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct ig_python);
} pythons SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct ig_losses);
} losses SEC(".maps");

INLINE struct ig_losses *losses_here(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&losses, &zero);
}

/* Put a process into a map of processes; one that does not fit is counted. */
INLINE void add_process(const void *map, u32 pid, const void *value)
{
	struct ig_losses *lost;

	if (bpf_map_update_elem(map, &pid, value, BPF_ANY) && (lost = losses_here()))
		ADD(lost->pids_full, 1);
}

/* NULL when tracing is over. */
INLINE struct ig_settings *settings_now(void)
{
	u32 zero = 0;
	struct ig_settings *now = bpf_map_lookup_elem(&settings, &zero);

	return now && !now->is_over ? now : 0;
}

/* IG_FLAG_EXACT for a kind that is never sampled. */
INLINE u8 exact_flag(const struct ig_settings *now, u8 source, u16 op)
{
	return now->exact[source & (IG_N_SOURCES - 1)] >> (op & 63) & 1 ? IG_FLAG_EXACT : 0;
}

/* Whether the user asked to watch this thread group. */
INLINE bool is_watched(const struct ig_settings *now, u32 pid, u64 cgroup_id, u32 uid)
{
	if (!now->filter)
		return 1;
	if (now->filter & 1 && bpf_map_lookup_elem(&filter_pids, &pid))
		return 1;
	if (now->filter & 2 && bpf_map_lookup_elem(&filter_cgroups, &cgroup_id))
		return 1;
	return now->filter & 4 && now->uid == uid;
}

#endif
