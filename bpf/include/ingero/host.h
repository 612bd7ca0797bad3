/* What the probes of the host share: records of their own rings, with loss counted by kind. */
#ifndef INGERO_HOST_H
#define INGERO_HOST_H

#include "ingero/counts.h"

INLINE void count_lost(u32 kind)
{
	struct ig_losses *lost = losses_here();

	if (lost && kind < 8)
		lost->host_lost[kind]++;
}

INLINE u64 cgroup_of(struct task_struct *task)
{
	return task->cgroups->dfl_cgrp->kn->id;
}

INLINE void set_header(struct ig_header *header, u16 kind, u32 size, u64 mono_ns)
{
	header->kind = kind;
	header->version = IG_RECORD_VERSION;
	header->size = size;
	header->mono_ns = mono_ns;
}

/* Whether a thread group makes probed calls and the user watches it. */
INLINE bool is_gpu_process(u32 pid)
{
	return bpf_map_lookup_elem(&gpu_pids, &pid) != 0;
}

#endif
