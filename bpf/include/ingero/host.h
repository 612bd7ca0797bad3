/* What the probes of the host share: records of their own rings, with loss counted by kind. */
#ifndef INGERO_HOST_H
#define INGERO_HOST_H

#include "ingero/counts.h"

INLINE void count_lost(u32 kind)
{
	struct ig_losses *lost = losses_here();

	if (lost && kind < 8)
		ADD(lost->host_lost[kind], 1);
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

/* What write_span needs to know of one thing that the current thread did. */
struct span {
	u64 start_ns;
	u64 duration_ns;
	u64 amount;
	s32 rc;
	u16 op;
	u16 family;
	u8 source;
	u8 flags;
	u8 reserved[6];
};

INLINE struct ig_choice choose_span(struct ig_count *count, const struct ig_settings *now, const struct span *what)
{
	struct finished finished = {
		.end_ns = what->start_ns + what->duration_ns,
		.duration_ns = what->duration_ns,
		.bytes = what->amount,
		.flags = what->flags | exact_flag(now, what->source, what->op),
	};

	if (what->amount >= IG_LARGE_BYTES)
		finished.flags |= IG_FLAG_LARGE;
	return choose(count, now, &finished);
}

/* Count what the current thread did, and write a record into the ring where it is chosen. */
#define COUNT_SPAN(ring, what)                                                                                         \
	do {                                                                                                           \
		u64 pid_tgid_ = bpf_get_current_pid_tgid();                                                            \
		struct ig_count *count_ = count_of(pid_tgid_ >> 32, (what)->source, (what)->op);                       \
		struct ig_settings *now_ = settings_now();                                                             \
		struct ig_choice choice_;                                                                              \
		struct ig_span *record_;                                                                               \
                                                                                                                       \
		if (!count_ || !now_)                                                                                  \
			break;                                                                                         \
		ADD(count_->entered, 1);                                                                               \
		choice_ = choose_span(count_, now_, (what));                                                           \
		if (!choice_.weight)                                                                                   \
			break;                                                                                         \
		record_ = bpf_ringbuf_reserve(&ring, sizeof(*record_), 0);                                             \
		if (!record_) {                                                                                        \
			choice_lost(count_, choice_);                                                                  \
			break;                                                                                         \
		}                                                                                                      \
		fill_span(record_, (what), pid_tgid_, choice_);                                                        \
		bpf_ringbuf_submit(record_, BPF_RB_NO_WAKEUP);                                                         \
	} while (0)

INLINE void fill_span(struct ig_span *record, const struct span *what, u64 pid_tgid, struct ig_choice choice)
{
	set_header(&record->header, IG_KIND_SPAN, sizeof(*record), what->start_ns);
	record->duration_ns = what->duration_ns;
	record->cgroup_id = bpf_get_current_cgroup_id();
	record->amount = what->amount;
	record->pid = pid_tgid >> 32;
	record->tid = (u32)pid_tgid;
	record->weight = choice.weight;
	record->rc = what->rc;
	record->op = what->op;
	record->family = what->family;
	record->source = what->source;
	record->flags = choice.flags;
	__builtin_memset(record->reserved, 0, sizeof(record->reserved));
	bpf_get_current_comm(record->comm, sizeof(record->comm));
}

enum { PF_KTHREAD = 0x00200000 }; /* include/linux/sched.h */

/* Whether the user asked to watch what a task does. Kernel threads work for everybody, so no filter asks for them. */
INLINE bool is_watched_task(struct task_struct *task)
{
	struct ig_settings *now = settings_now();

	if (!now)
		return 0;
	if (!now->filter)
		return 1;
	return !(task->flags & PF_KTHREAD) && is_watched(now, task->tgid, cgroup_of(task), task->cred->uid.val);
}

/* Whether a thread group makes probed calls and the user watches it. */
INLINE bool is_gpu_process(u32 pid)
{
	return bpf_map_lookup_elem(&gpu_pids, &pid) != 0;
}

#endif
