/* Gloo as PyTorch uses it: which communicator a context belongs to, and the number of every collective.
 *
 * Source: torch/csrc/distributed/c10d/{Store,PrefixStore,Backend,ProcessGroupGloo}.hpp of PyTorch 2.13.0 and gloo/context.h of the Gloo that it is built with,
 * on LP64 with libstdc++; user space attaches these programs to files of known versions only.
 */
#ifndef INGERO_GLOO_H
#define INGERO_GLOO_H

#include "ingero/nccl.h"

enum {
	STORE_PREFIX_AT = 24, /* behind the virtual table, the reference counts and Store::timeout_ */
	STORE_NEXT_AT = 56,
	CONTEXT_AT = 8, /* of the gloo::Context in a gloo::rendezvous::Context; it begins with int rank, int size */
	GROUP_RANK_AT = 16, /* of a ProcessGroupGloo: int rank, int size */
	GROUP_STORE_AT = 136, /* its GlooStore, and in that the c10d::Store */
	GLOO_STORE_AT = 8,
	GROUP_CONTEXTS_AT = 160, /* a std::vector of std::shared_ptr: one for each device, one if nobody asked for more */
	CONTEXT_BYTES = 16,
	GLOO_MAX_CONTEXTS = 4,
	GLOO_MAX_STORES = 6,
	GLOO_PREFIX_BYTES = 128,
};

/* Mixes the prefix of a PrefixStore into a hash; 0 when it cannot be read or is none. */
NOINLINE u64 hash_prefix(u64 store, u64 hash)
{
	struct {
		u64 text;
		u64 length;
	} prefix; /* how a std::string begins */
	u64 words[GLOO_PREFIX_BYTES / 8] = {};

	if (bpf_probe_read_user(&prefix, sizeof(prefix), (void *)(store + STORE_PREFIX_AT)))
		return 0;
	if (!prefix.length || prefix.length >= GLOO_PREFIX_BYTES)
		return 0;
	if (bpf_probe_read_user(words, prefix.length & (GLOO_PREFIX_BYTES - 1), (void *)prefix.text))
		return 0;
	hash = mix64(hash ^ prefix.length);
	for (u32 i = 0; i < GLOO_PREFIX_BYTES / 8; i++)
		hash = mix64(hash ^ words[i]);
	return hash;
}

/* Hash of the prefixes that lead to a group's keys, which are the same on every member and in no other group of the job. The store
 * beneath them is of another class, which its virtual table shows. 0: not known.
 */
NOINLINE u64 hash_stores(u64 store)
{
	u64 class = 0, prefixes = 0, hash = 0x9e3779b97f4a7c15ull;

	for (u32 i = 0; i < GLOO_MAX_STORES; i++) {
		if (bpf_probe_read_user(&class, sizeof(class), (void *)store))
			return 0;
		if (i && class != prefixes)
			return hash;
		prefixes = class;
		hash = hash_prefix(store, hash);
		if (!hash || bpf_probe_read_user(&store, sizeof(store), (void *)(store + STORE_NEXT_AT)))
			return 0;
	}
	return 0;
}

/* A context of the group that this thread is making; one that says another rank or size is not as we know it. */
INLINE void gloo_connect(struct ig_thread *thread, u64 context)
{
	u32 depth = thread->depth;
	struct ig_communicator entry = {.device = -1};
	struct ig_frame *group;
	s32 place[2];

	if (!depth || depth > IG_MAX_DEPTH)
		return;
	group = &thread->frames[(depth - 1) & (IG_MAX_DEPTH - 1)];
	if (group->source != IG_SOURCE_GLOO || group->nranks <= 0 || !group->comm_hash)
		return;
	if (bpf_probe_read_user(place, sizeof(place), (void *)context))
		return;
	if (place[0] != group->rank || place[1] != group->nranks)
		return;
	entry.hash = group->comm_hash;
	entry.created_ns = group->entry_ns;
	entry.rank = place[0];
	entry.nranks = place[1];
	communicator_add(thread->pid, context, &entry);
}

/* The contexts of a group: where the pointers to them begin and end; 0 when they cannot be read. */
INLINE bool gloo_contexts(u64 group, u64 contexts[2])
{
	return !bpf_probe_read_user(contexts, 2 * sizeof(*contexts), (void *)(group + GROUP_CONTEXTS_AT));
}

/* The store of a group that was made before it was probed: one of its contexts is of no communicator. 0: there is none such. */
NOINLINE u64 gloo_unmet(u32 pid, u64 group)
{
	u64 contexts[2], context, store;

	if (!gloo_contexts(group, contexts))
		return 0;
	for (u32 i = 0; i < GLOO_MAX_CONTEXTS; i++) {
		if (contexts[0] >= contexts[1] || bpf_probe_read_user(&context, sizeof(context), (void *)contexts[0]))
			return 0;
		contexts[0] += CONTEXT_BYTES;
		if (communicator_of(pid, context))
			continue;
		if (bpf_probe_read_user(&store, sizeof(store), (void *)(group + GROUP_STORE_AT)))
			return 0;
		return bpf_probe_read_user(&store, sizeof(store), (void *)(store + GLOO_STORE_AT)) ? 0 : store;
	}
	return 0;
}

/* Makes the contexts of a group communicators of this hash. One that says another rank or size is not as we know it. */
NOINLINE int gloo_meet(u32 pid, u64 group, u64 hash)
{
	struct ig_communicator entry = {.hash = hash, .device = -1};
	u64 contexts[2], context;
	s32 place[2], own[2];

	if (!gloo_contexts(group, contexts))
		return 0;
	if (bpf_probe_read_user(place, sizeof(place), (void *)(group + GROUP_RANK_AT)))
		return 0;
	entry.created_ns = bpf_ktime_get_ns();
	entry.rank = place[0];
	entry.nranks = place[1];
	for (u32 i = 0; i < GLOO_MAX_CONTEXTS; i++) {
		if (contexts[0] >= contexts[1] || bpf_probe_read_user(&context, sizeof(context), (void *)contexts[0]))
			return 0;
		contexts[0] += CONTEXT_BYTES;
		if (bpf_probe_read_user(own, sizeof(own), (void *)context))
			return 0;
		if (own[0] == place[0] && own[1] == place[1] && !communicator_of(pid, context))
			communicator_add(pid, context, &entry);
	}
	return 0;
}

/* What the arguments of a Gloo call say, put into its frame; 0 when the call leaves no record. */
INLINE bool gloo_entry(struct ig_frame *frame, const struct ig_descriptor *desc, const struct ig_registers *regs,
		       struct ig_thread *thread)
{
	struct ig_handle_key key = {.pid = thread->pid};
	struct ig_communicator *comm;
	u64 store, hash;

	frame->comm_ptr = fetch(regs, desc->args[IG_ARG_COMM]);
	frame->count = fetch(regs, desc->args[IG_ARG_COUNT]);
	frame->dtype = frame->redop = -1;
	frame->peer = desc->args[IG_ARG_PEER] ? (s32)argument(regs, desc->args[IG_ARG_PEER]) : -1;
	frame->rank = desc->args[IG_ARG_RANK] ? (s32)argument(regs, desc->args[IG_ARG_RANK]) : -1;
	frame->nranks = desc->args[IG_ARG_NRANKS] ? (s32)argument(regs, desc->args[IG_ARG_NRANKS]) : -1;
	frame->comm_hash = 0;
	frame->seq = 0;
	switch (desc->act) {
	case IG_ACT_GLOO_GROUP:
		frame->comm_hash = hash_stores(argument(regs, desc->args[IG_ARG_ID]));
		return 1;
	case IG_ACT_GLOO_CONNECT:
		gloo_connect(thread, frame->comm_ptr + CONTEXT_AT);
		return 0;
	case IG_ACT_GLOO_CLOSE:
		key.handle = frame->comm_ptr;
		bpf_map_delete_elem(&communicators, &key);
		return 0;
	case IG_ACT_GLOO_CAUGHT:
		return 0;
	case IG_ACT_GLOO_NEXT:
		store = gloo_unmet(thread->pid, frame->comm_ptr);
		hash = store ? hash_stores(store) : 0;
		if (hash)
			gloo_meet(thread->pid, frame->comm_ptr, hash);
		return 0;
	case IG_ACT_COLLECTIVE:
		frame->seq = (u32)argument(regs, desc->args[IG_ARG_TAG]) + 1ull;
		comm = communicator_of(thread->pid, frame->comm_ptr);
		if (!comm)
			return 1;
		frame->comm_hash = comm->hash;
		frame->rank = comm->rank;
		frame->nranks = comm->nranks;
		return 1;
	default:
		return 1;
	}
}

#endif
