/* NCCL communicators: who they are, which rank this is, and the number of every collective. */
#ifndef INGERO_NCCL_H
#define INGERO_NCCL_H

#include "ingero/arguments.h"
#include "ingero/maps/shared.h"

struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(max_entries, 16384);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, struct ig_handle_key);
	MAP_TYPE(value, struct ig_communicator);
} communicators SEC(".maps");

enum { NCCL_ID_WORDS = 16, NCCL_MAX_INIT_ALL = 16, NCCL_SPLIT_NOCOLOR = -1 };

/* splitmix64's finalizer (Steele, Lea, Flood 2014); joins with hashes of the recorded databases. */
INLINE u64 mix64(u64 value)
{
	value ^= value >> 30;
	value *= 0xbf58476d1ce4e5b9ull;
	value ^= value >> 27;
	value *= 0x94d049bb133111ebull;
	return value ^ value >> 31;
}

/* Hash of the 128-byte unique id, equal on every rank; 0 when it cannot be read. */
NOINLINE u64 hash_unique_id(u64 address)
{
	u64 words[NCCL_ID_WORDS], hash = 0x9e3779b97f4a7c15ull;

	if (!address || bpf_probe_read_user(words, sizeof(words), (void *)address))
		return 0;
	for (u32 i = 0; i < NCCL_ID_WORDS; i++)
		hash = mix64(hash ^ words[i]);
	return hash;
}

INLINE struct ig_communicator *communicator_of(u32 pid, u64 comm)
{
	struct ig_handle_key key = {.handle = comm, .pid = pid};

	return bpf_map_lookup_elem(&communicators, &key);
}

INLINE void communicator_add(u32 pid, u64 comm, struct ig_communicator *entry)
{
	struct ig_handle_key key = {.handle = comm, .pid = pid};
	struct ig_losses *lost;

	if (!comm)
		return;
	if (bpf_map_update_elem(&communicators, &key, entry, BPF_ANY) && (lost = losses_here()))
		ADD(lost->comms_full, 1);
}

INLINE u64 size_of_nccl_type(s32 dtype)
{
	/* nccl.h 2.28 ncclDataType_t: i8 u8 i32 u32 i64 u64 f16 f32 f64 bf16 f8e4m3 f8e5m2, one hex digit each. */
	const u64 sizes = 0x112842884411ull;

	if (dtype < 0 || dtype > 11)
		return 0;
	return sizes >> (4 * dtype) & 0xf;
}

/* Hash of a communicator made from another: every parent rank makes its children in the same order. */
INLINE u64 hash_child(u64 parent, u64 number, s32 color)
{
	u64 hash = mix64(mix64(parent ^ number) ^ (u32)color);

	return parent ? hash : 0;
}

/* What the arguments of a NCCL call say, put into its frame. caller: the frame below, where this call is nested. */
INLINE void nccl_entry(struct ig_frame *frame, const struct ig_frame *caller, const struct ig_descriptor *desc,
		       const struct ig_registers *regs, u32 pid)
{
	struct ig_communicator *comm;

	frame->comm_ptr = argument(regs, desc->args[IG_ARG_COMM]);
	frame->count = argument(regs, desc->args[IG_ARG_COUNT]);
	frame->dtype = desc->args[IG_ARG_DTYPE] ? (s8)argument(regs, desc->args[IG_ARG_DTYPE]) : -1;
	frame->redop = desc->args[IG_ARG_REDOP] ? (s8)argument(regs, desc->args[IG_ARG_REDOP]) : -1;
	frame->peer = desc->args[IG_ARG_PEER] ? (s32)argument(regs, desc->args[IG_ARG_PEER]) : -1;
	frame->rank = desc->args[IG_ARG_RANK] ? (s32)argument(regs, desc->args[IG_ARG_RANK]) : -1;
	frame->nranks = desc->args[IG_ARG_NRANKS] ? (s32)argument(regs, desc->args[IG_ARG_NRANKS]) : -1;
	frame->comm_hash = 0;
	frame->seq = 0;
	frame->bytes = frame->count * size_of_nccl_type(frame->dtype);
	if (desc->args[IG_ARG_ID]) {
		frame->comm_hash = hash_unique_id(argument(regs, desc->args[IG_ARG_ID]));
		return;
	}
	comm = frame->comm_ptr ? communicator_of(pid, frame->comm_ptr) : 0;
	if (!comm)
		return;
	frame->comm_hash = comm->hash;
	if (desc->act == IG_ACT_COMM_SPLIT) {
		frame->aux = argument(regs, desc->args[IG_ARG_COLOR]);
		frame->comm_hash = hash_child(comm->hash, __sync_fetch_and_add(&comm->n_splits, 1) + 1, (s32)frame->aux);
		return;
	}
	frame->rank = comm->rank;
	frame->nranks = comm->nranks;
	if (desc->act != IG_ACT_COLLECTIVE)
		return;
	/* What a collective makes of others on its own communicator is that collective. */
	if (frame->flags & IG_FLAG_NESTED && caller->source == IG_SOURCE_NCCL && caller->seq &&
	    caller->comm_ptr == frame->comm_ptr)
		frame->seq = caller->seq;
	else
		frame->seq = __sync_fetch_and_add(&comm->seq, 1) + 1;
}

INLINE void nccl_init_all(struct ig_frame *frame, u32 pid)
{
	struct ig_communicator entry = {.created_ns = frame->entry_ns, .nranks = frame->nranks, .device = -1};
	u64 first = 0, comm;

	/* All ranks live in this process: any value of this process's own names the communicator. */
	bpf_probe_read_user(&first, sizeof(first), (void *)frame->out);
	frame->comm_hash = entry.hash = mix64(mix64(first ^ (u64)pid << 32) ^ frame->entry_ns);
	for (s32 i = 0; i < NCCL_MAX_INIT_ALL; i++) {
		if (i >= frame->nranks)
			break;
		if (bpf_probe_read_user(&comm, sizeof(comm), (void *)(frame->out + 8 * i)))
			break;
		entry.rank = i;
		communicator_add(pid, comm, &entry);
	}
}

/* A communicator call returned without an error. */
INLINE void nccl_return(struct ig_frame *frame, u32 act, struct ig_thread *thread)
{
	struct ig_communicator entry = {
		.hash = frame->comm_hash,
		.created_ns = frame->entry_ns,
		.rank = frame->rank,
		.nranks = frame->nranks,
		.device = thread->device,
	};
	struct ig_handle_key key = {.handle = frame->comm_ptr, .pid = thread->pid};
	struct ig_communicator *comm;
	s32 value = 0;

	switch (act) {
	case IG_ACT_COMM_INIT:
	case IG_ACT_COMM_SPLIT:
		bpf_probe_read_user(&frame->comm_ptr, sizeof(frame->comm_ptr), (void *)frame->out);
		communicator_add(thread->pid, frame->comm_ptr, &entry);
		break;
	case IG_ACT_COMM_INIT_ALL:
		nccl_init_all(frame, thread->pid);
		break;
	case IG_ACT_COMM_END:
		bpf_map_delete_elem(&communicators, &key);
		break;
	case IG_ACT_COMM_RANK:
	case IG_ACT_COMM_COUNT:
		if (bpf_probe_read_user(&value, sizeof(value), (void *)frame->out))
			break;
		comm = bpf_map_lookup_elem(&communicators, &key);
		if (!comm) {
			entry.seq = 0;
			entry.hash = 0;
			communicator_add(thread->pid, frame->comm_ptr, &entry);
			comm = bpf_map_lookup_elem(&communicators, &key);
		}
		if (comm && act == IG_ACT_COMM_RANK)
			frame->rank = comm->rank = value;
		else if (comm)
			frame->nranks = comm->nranks = value;
		break;
	default:
		break;
	}
}

#endif
