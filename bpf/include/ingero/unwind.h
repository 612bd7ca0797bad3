/* Native frames of a stack: by the unwind tables of the files that the code is from, otherwise by frame pointer.
 *
 * User space reads the tables and writes a rule for each address that it has met. Where a rule is missing, a copy of the
 * stack goes to user space, which follows it and writes the rules that were missing: from then on the kernel walks alone.
 * What differs between processors is begin_walk(), step_out() and keep_registers().
 */
#ifndef INGERO_UNWIND_H
#define INGERO_UNWIND_H

#include "ingero/arguments.h"

enum {
	IG_PAGE = 4096, /* copied at once; the kernel's own pages are as large, or larger */
	IG_COPY_BURST = 128,           /* copies in a row; the ring holds 202 */
	IG_COPY_EVERY_NS = 31250000,   /* in the long run: 32 a second */
	IG_COPY_AGAIN_NS = 50000000,   /* after one for the same place, which user space is still reading */
	IG_WALK_RETURNS = 4,           /* replaced return addresses looked at in one step */
#if defined(__TARGET_ARCH_x86)
	/* Of what the kernel pushes for a signal handler (struct rt_sigframe, arch/x86/include/asm/sigframe.h). */
	IG_SIGNAL_BP = 120,
	IG_SIGNAL_SP = 160,
	IG_SIGNAL_IP = 168,
#else
	/* The same (arch/arm64/kernel/signal.c): 128 bytes of siginfo, 176 of struct ucontext, 8 of struct sigcontext, then x0. */
	IG_SIGNAL_BP = 312 + 29 * 8,
	IG_SIGNAL_LINK = 312 + 30 * 8,
	IG_SIGNAL_SP = 312 + 31 * 8,
	IG_SIGNAL_IP = 312 + 32 * 8,
#endif
};
#define IG_RETURN_BIT (1ull << 63)

struct {
	MAP_UINT(type, BPF_MAP_TYPE_LRU_HASH);
	MAP_UINT(max_entries, 32768);
	MAP_TYPE(key, struct ig_unwind_key);
	MAP_TYPE(value, struct ig_unwind_rule);
} unwind_rules SEC(".maps");

/* When a copy was last made for want of a rule; the key's image is mixed with the stack pointer, so that several paths which meet the
 * same address are copied at once.
 */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_LRU_HASH);
	MAP_UINT(max_entries, 4096);
	MAP_TYPE(key, struct ig_unwind_key);
	MAP_TYPE(value, u64);
} missing_rules SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 4 << 20);
} stack_copies SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct ig_unwinding);
} unwinding SEC(".maps");

/* When the next copy is due, moved on with each: a bucket of tokens in one number. Two CPUs may take the
 * same token, which does no harm.
 */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_ARRAY);
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, u64);
} copies_due SEC(".maps");

INLINE u64 read_user_word(u64 address)
{
	u64 value = 0;

	if (bpf_probe_read_user(&value, sizeof(value), (void *)address))
		return 0;
	return value;
}

INLINE u64 mix_word(u64 hash, u64 word)
{
	hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
	return hash ^ (hash >> 29);
}

INLINE struct ig_unwinding *unwinding_here(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&unwinding, &zero);
}

/* Native frames by frame pointer, over what the slot holds. */
INLINE u64 walk_frame_pointers(struct pt_regs *ctx, struct ig_slot *slot, u64 hash)
{
	struct ig_stack *stack = &slot->stack;
	long n_bytes = bpf_get_stack(ctx, stack->native, sizeof(stack->native), BPF_F_USER_STACK);

	stack->n_native = n_bytes > 0 ? (u64)n_bytes / 8 : 0;
	for (u32 i = 0; i < IG_MAX_NATIVE && i < stack->n_native; i++)
		hash = mix_word(hash, stack->native[i]);
	return hash;
}

/* A return address that a return probe has replaced with the kernel's own. */
struct pending_return {
	u64 stack; /* the stack pointer as its function began, as in ig_return; 0: there is no more */
	u64 address;
	u64 next; /* struct return_instance, outwards */
};

struct unwind_walk {
	struct ig_slot *slot;
	struct ig_unwind_key key; /* of the frame that is next */
	u64 sp;
	u64 bp;
	struct pending_return pending; /* the next outwards */
	u64 hash;
	u64 is_missing; /* there is no rule for the last frame */
#if defined(__TARGET_ARCH_arm64)
	u64 link;        /* x30; 0: the frame has called another, which changed it */
	u64 mask;        /* of an address; above it may be a signature (pointer authentication) */
	u64 is_sp_least; /* the stack pointer is this or more: the frame before was left by its frame record */
#endif
};

/* Without a branch, for the verifier's sake: what cannot be read becomes 0. */
INLINE void read_pending(u64 instance, struct pending_return *to)
{
	struct return_instance *at = (void *)instance;

	bpf_probe_read_kernel(&to->stack, sizeof(to->stack), &at->stack);
	bpf_probe_read_kernel(&to->address, sizeof(to->address), &at->orig_ret_vaddr);
	bpf_probe_read_kernel(&to->next, sizeof(to->next), &at->next);
}

/* What a return address is in truth, where a probe has replaced it; several probes may have, and the outermost knows. */
INLINE u64 read_through(struct unwind_walk *walk, u64 slot, u64 address)
{
	for (u32 i = 0; i < IG_WALK_RETURNS; i++) {
		if (!walk->pending.stack || walk->pending.stack > slot)
			break;
		address = walk->pending.stack == slot ? walk->pending.address : address;
		read_pending(walk->pending.next, &walk->pending);
	}
	return address;
}

#if defined(__TARGET_ARCH_x86)

INLINE void begin_walk(UNUSED struct unwind_walk *walk, UNUSED struct pt_regs *ctx, UNUSED struct task_struct *task)
{
}

INLINE void keep_registers(UNUSED const struct unwind_walk *walk, struct ig_stack_copy *copy)
{
	copy->link = 0;
	copy->is_sp_least = 0;
}

INLINE bool step_out_of_signal(struct unwind_walk *walk)
{
	walk->key.pc = read_user_word(walk->sp + IG_SIGNAL_IP);
	walk->bp = read_user_word(walk->sp + IG_SIGNAL_BP);
	walk->sp = read_user_word(walk->sp + IG_SIGNAL_SP);
	return walk->key.pc;
}

/* The caller of the frame; false where the stack does not hold one. */
INLINE bool step_out(struct unwind_walk *walk, const struct ig_unwind_rule *rule)
{
	u64 cfa = walk->sp + rule->cfa_offset, bp = walk->bp, words[2];

	if (rule->kind == IG_UNWIND_SIGNAL)
		return step_out_of_signal(walk);
	if (rule->kind == IG_UNWIND_BP)
		cfa = bp + rule->cfa_offset;
	else if (rule->kind == IG_UNWIND_REALIGNED)
		cfa = read_user_word(bp + rule->cfa_offset);
	if (cfa <= walk->sp || bpf_probe_read_user(words, sizeof(words), (void *)(cfa - sizeof(words))))
		return 0;
	if (rule->kind == IG_UNWIND_REALIGNED)
		walk->bp = read_user_word(bp + rule->bp_offset);
	else if (rule->bp_offset)
		walk->bp = rule->bp_offset == -16 ? words[0] : read_user_word(cfa + rule->bp_offset);
	walk->key.pc = read_through(walk, cfa - 8, words[1]);
	walk->sp = cfa;
	if (!walk->key.pc)
		return 0;
	walk->key.pc |= IG_RETURN_BIT;
	return 1;
}

#else

INLINE void begin_walk(struct unwind_walk *walk, struct pt_regs *ctx, struct task_struct *task)
{
	struct mm_struct *memory = task->mm;

	walk->link = ctx->regs[30];
	walk->mask = memory->task_size - 1;
}

INLINE void keep_registers(const struct unwind_walk *walk, struct ig_stack_copy *copy)
{
	copy->link = walk->link;
	copy->is_sp_least = walk->is_sp_least;
}

INLINE bool step_out_of_signal(struct unwind_walk *walk)
{
	walk->key.pc = read_user_word(walk->sp + IG_SIGNAL_IP);
	walk->bp = read_user_word(walk->sp + IG_SIGNAL_BP);
	walk->link = read_user_word(walk->sp + IG_SIGNAL_LINK);
	walk->sp = read_user_word(walk->sp + IG_SIGNAL_SP);
	return walk->key.pc;
}

/* By what a function with a frame pointer leaves on the stack: the caller's x29 and the return address (AAPCS64, "the frame pointer"). */
INLINE bool step_out_of_record(struct unwind_walk *walk)
{
	u64 record = walk->bp, words[2];

	if (record < walk->sp || bpf_probe_read_user(words, sizeof(words), (void *)record))
		return 0;
	walk->sp = record + sizeof(words);
	walk->is_sp_least = 1;
	walk->link = 0;
	walk->bp = words[0];
	walk->key.pc = words[1] & walk->mask;
	if (!walk->key.pc)
		return 0;
	walk->key.pc |= IG_RETURN_BIT;
	return 1;
}

/* The caller of the frame; false where the stack does not hold one. */
INLINE bool step_out(struct unwind_walk *walk, const struct ig_unwind_rule *rule)
{
	u64 cfa = walk->sp + rule->cfa_offset, link = walk->link;

	if (rule->kind == IG_UNWIND_RECORD)
		return step_out_of_record(walk);
	if (rule->kind == IG_UNWIND_SIGNAL)
		return !walk->is_sp_least && step_out_of_signal(walk);
	if (rule->kind == IG_UNWIND_BP)
		cfa = walk->bp + rule->cfa_offset;
	else if (walk->is_sp_least) /* x29 leads to where it and the return address are saved, if side by side */
		cfa = rule->bp_offset && rule->return_offset == rule->bp_offset + 8 ? walk->bp - rule->bp_offset : 0;
	/* A function that has not saved its return address may not have moved the stack pointer either. */
	if (cfa < walk->sp || (cfa == walk->sp && rule->return_offset))
		return 0;
	if (rule->return_offset)
		link = read_user_word(cfa + rule->return_offset);
	if (rule->bp_offset)
		walk->bp = read_user_word(cfa + rule->bp_offset);
	walk->key.pc = read_through(walk, cfa, link) & walk->mask;
	walk->sp = cfa;
	walk->is_sp_least = 0;
	walk->link = 0;
	if (!walk->key.pc)
		return 0;
	walk->key.pc |= IG_RETURN_BIT;
	return 1;
}

#endif

STEP(unwind_step, struct unwind_walk *walk)
{
	struct ig_stack *stack = &walk->slot->stack;
	u64 pc = walk->key.pc & ~IG_RETURN_BIT, n = stack->n_native;
	struct ig_unwind_rule *rule;

	asm volatile("" : "+r"(n));
	if (n >= IG_MAX_NATIVE) {
		stack->flags |= IG_STACK_NATIVE_CUT;
		return 1;
	}
	stack->native[n] = pc;
	stack->n_native = n + 1;
	walk->hash = mix_word(walk->hash, pc);
	rule = bpf_map_lookup_elem(&unwind_rules, &walk->key);
	if (!rule) {
		walk->is_missing = 1;
		return 1;
	}
	if (rule->kind == IG_UNWIND_END)
		return 1;
	if (rule->kind != IG_UNWIND_UNKNOWN && step_out(walk, rule))
		return 0;
	if (walk->key.pc) /* address 0 is an end, too */
		stack->flags |= IG_STACK_NO_RULE;
	return 1;
}

/* Whether a copy may be made now. */
INLINE bool is_copy_due(const struct unwind_walk *walk)
{
	struct ig_unwind_key key = {mix_word(walk->key.image, walk->sp), walk->key.pc};
	u32 zero = 0;
	u64 *due = bpf_map_lookup_elem(&copies_due, &zero), *last, earliest, now_ns = bpf_ktime_get_ns();

	if (!due || *due > now_ns)
		return 0;
	last = bpf_map_lookup_elem(&missing_rules, &key);
	if (last && now_ns - *last < IG_COPY_AGAIN_NS)
		return 0;
	earliest = now_ns - (u64)IG_COPY_BURST * IG_COPY_EVERY_NS;
	*due = (*due < earliest ? earliest : *due) + IG_COPY_EVERY_NS;
	bpf_map_update_elem(&missing_rules, &key, &now_ns, BPF_ANY);
	return 1;
}

/* Copy the stack from the frame that has no rule; false when it did not fit. */
NOINLINE bool copy_stack(struct unwind_walk *walk)
{
	struct ig_stack *stack = &walk->slot->stack;
	u64 from = walk->sp & -(u64)IG_PAGE, now_ns = bpf_ktime_get_ns();
	struct ig_stack_copy *copy = bpf_ringbuf_reserve(&stack_copies, sizeof(*copy), 0);

	if (!copy)
		return 0;
	copy->header.kind = IG_KIND_STACK_COPY;
	copy->header.version = IG_RECORD_VERSION;
	copy->header.size = sizeof(*copy);
	copy->header.mono_ns = now_ns;
	copy->id = stack->id = mix_word(mix_word(walk->hash, now_ns), walk->sp) | 1;
	copy->image = walk->key.image;
	copy->pc = walk->key.pc;
	copy->sp = walk->sp;
	copy->bp = walk->bp;
	keep_registers(walk, copy);
	copy->reserved = 0;
	copy->pid = stack->pid;
	copy->n_bytes = 0;
	for (u32 page = 0; page < IG_COPY_BYTES / IG_PAGE; page++) {
		if (bpf_probe_read_user(copy->data + page * IG_PAGE, IG_PAGE, (void *)(from + page * IG_PAGE)))
			break;
		copy->n_bytes += IG_PAGE;
	}
	for (u32 i = 0; i < IG_MAX_RETURNS; i++) {
		copy->returns[i].slot = walk->pending.stack;
		copy->returns[i].address = walk->pending.address;
		read_pending(walk->pending.next, &walk->pending);
	}
	stack->flags |= IG_STACK_COPIED | IG_STACK_UNWOUND;
	bpf_ringbuf_submit(copy, 0);
	return 1;
}

/* Fill in the native frames; their hash. */
INLINE u64 walk_native(struct pt_regs *ctx, struct ig_slot *slot, struct task_struct *task, u64 image)
{
	struct unwind_walk walk = {
		.slot = slot, .key = {image, instruction_pointer(ctx)}, .sp = ctx->sp, .bp = frame_pointer(ctx), .hash = image,
	};
	struct ig_unwinding *count = unwinding_here();
	struct return_instance *returns = 0;
	struct uprobe_task *uprobes = task->utask;

	slot->stack.n_native = 0;
	if (!count)
		return image;
	if (uprobes)
		returns = uprobes->return_instances;
	read_pending((u64)returns, &walk.pending);
	begin_walk(&walk, ctx, task);
	REPEAT(unwind_steps, unwind_step, &walk);
	if (!walk.is_missing) {
		slot->stack.flags |= IG_STACK_UNWOUND;
		ADD(count->by_rules, 1);
		return walk.hash;
	}
	if (is_copy_due(&walk)) {
		if (copy_stack(&walk)) {
			ADD(count->copied, 1);
			return walk.hash;
		}
		ADD(count->copies_lost, 1);
	}
	ADD(count->by_frame_pointer, 1);
	return walk_frame_pointers(ctx, slot, image);
}

#endif
