/* Where a call was made from: native frames (unwind.h), and Python frames by walking the interpreter's own chain.
 *
 * A stack is built in a slot, hashed, and written only when its hash is new; calls carry the hash. Python frames are pairs
 * of code object and instruction: names and lines are looked up in user space, once per code object.
 */
#ifndef INGERO_STACKS_H
#define INGERO_STACKS_H

#include "ingero/maps/shared.h"

enum {
	IG_FRAME_BYTES = 120,   /* of an interpreter's frame: all that we read of one */
	IG_MAX_SHIMS = 64,      /* frames that stand for C code, beside the Python frames */
	IG_MAX_THREADS = 4096,  /* looked at to find the one that runs */
	IG_OWNER_INTERPRETER = 3, /* this owner and those above: no Python code (CPython 3.12 to 3.14) */
	IG_N_SLOTS = 4,
};

/* A place to build a stack in. A thread may be preempted while it does, so each CPU has several, each taken by one thread. */
struct ig_slot {
	u32 is_taken;
	u32 reserved;
	struct ig_stack stack;
	u8 frame[IG_FRAME_BYTES + 8];
};

struct {
	MAP_UINT(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	MAP_UINT(max_entries, IG_N_SLOTS);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct ig_slot);
} stack_slots SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_LRU_HASH);
	MAP_UINT(max_entries, 16384);
	MAP_TYPE(key, u64);
	MAP_TYPE(value, u8);
} seen_stacks SEC(".maps");

/* The thread state of a thread, by tid: a guess that is checked, so an old entry does no harm. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_LRU_HASH);
	MAP_UINT(max_entries, 65536);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, u64);
} python_threads SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 4 << 20);
} stacks SEC(".maps");

REPEATS(search_steps, IG_MAX_THREADS);
REPEATS(walk_steps, IG_MAX_PYTHON + IG_MAX_SHIMS);
REPEATS(unwind_steps, IG_MAX_NATIVE + 1);

#include "ingero/unwind.h"

/* What the kernel keeps as the thread pointer: the FS segment's base on x86-64, TPIDR_EL0 on arm64, where it is the value of the
 * last switch away from the thread: it does not change while a thread lives.
 */
INLINE u64 thread_pointer(struct task_struct *task)
{
#if defined(__TARGET_ARCH_x86)
	return task->thread.fsbase;
#else
	return task->thread.uw.tp_value;
#endif
}

/* Whether a pthread_self() is of the thread with this thread pointer. x86-64: the pointer is it. arm64: struct pthread ends where the
 * pointer points, and its size is the C library's (glibc 2.36: 1 856 bytes, musl 1.2: 200); no other thread's lies so near.
 */
#define IG_MAX_PTHREAD_BYTES 4096

INLINE bool is_own_block(u64 block, u64 pointer)
{
#if defined(__TARGET_ARCH_x86)
	return block == pointer;
#else
	return block && pointer - block <= IG_MAX_PTHREAD_BYTES;
#endif
}

struct thread_search {
	const struct ig_python *python;
	u64 pointer; /* of the running thread */
	u64 interpreter;
	u64 thread; /* 0: go on to the next interpreter */
	u64 found;
};

STEP(search_step, struct thread_search *search)
{
	const struct ig_python *python = search->python;

	if (!search->thread) {
		if (!search->interpreter)
			return 1;
		search->thread = read_user_word(search->interpreter + python->threads_head);
		search->interpreter = read_user_word(search->interpreter + python->interpreter_next);
		return 0;
	}
	if (is_own_block(read_user_word(search->thread + python->thread_id), search->pointer)) {
		search->found = search->thread;
		return 1;
	}
	search->thread = read_user_word(search->thread + python->thread_next);
	return 0;
}

/* The running thread's PyThreadState; 0 when the interpreter has not met it.
 *
 * `thread_id` is pthread_self(), the thread's control block: true in every pid namespace.
 */
INLINE u64 find_python_thread(const struct ig_python *python, struct task_struct *task)
{
	struct thread_search search = {.python = python, .pointer = thread_pointer(task)};
	u32 tid = task->pid;
	u64 *known = bpf_map_lookup_elem(&python_threads, &tid);

	if (known && is_own_block(read_user_word(*known + python->thread_id), search.pointer))
		return *known;
	search.interpreter = read_user_word(python->runtime + python->interpreters_head);
	search.thread = read_user_word(search.interpreter + python->threads_head);
	search.interpreter = read_user_word(search.interpreter + python->interpreter_next);
	REPEAT(search_steps, search_step, &search);
	if (search.found)
		bpf_map_update_elem(&python_threads, &tid, &search.found, BPF_ANY);
	return search.found;
}

struct python_walk {
	const struct ig_python *python;
	struct ig_slot *slot;
	u64 frame;
	u64 hash;
};

/* A field of the frame that was just read. */
#define FRAME_FIELD(type, slot, offset) (*(type *)((slot)->frame + ((offset) & 127)))

/* The compiler must not see that the index is in range, or it drops the mask that the verifier needs. */
INLINE struct ig_python_frame *python_frame(struct ig_slot *slot, u32 index)
{
	asm volatile("" : "+r"(index));
	return &slot->stack.python[index & (IG_MAX_PYTHON - 1)];
}

STEP(walk_step, struct python_walk *walk)
{
	const struct ig_python *python = walk->python;
	struct ig_slot *slot = walk->slot;
	struct ig_python_frame *to;
	u32 n = slot->stack.n_python;
	u64 code, instruction;
	bool is_entry;
	s64 offset;

	if (!walk->frame)
		return 1;
	if (bpf_probe_read_user(slot->frame, IG_FRAME_BYTES, (void *)walk->frame)) {
		slot->stack.flags |= IG_STACK_PYTHON_BROKEN;
		return 1;
	}
	walk->frame = FRAME_FIELD(u64, slot, python->frame_previous & 0x78);
	if (python->frame_owner != IG_NO_OFFSET && FRAME_FIELD(u8, slot, python->frame_owner) >= IG_OWNER_INTERPRETER) {
		if (n)
			python_frame(slot, n - 1)->flags |= IG_FRAME_ENTRY;
		return 0;
	}
	if (n >= IG_MAX_PYTHON) {
		slot->stack.flags |= IG_STACK_PYTHON_CUT;
		return 1;
	}
	code = FRAME_FIELD(u64, slot, python->frame_code & 0x78) & ~7ull; /* 3.14 keeps a tag in the low bits */
	if (python->code_first == IG_NO_OFFSET) {
		offset = (s64)FRAME_FIELD(s32, slot, python->frame_instruction & 0x7c) * python->instruction_unit;
		is_entry = 1;
	} else {
		instruction = FRAME_FIELD(u64, slot, python->frame_instruction & 0x78);
		offset = (s64)(instruction - code - python->code_first);
		is_entry = python->frame_entry != IG_NO_OFFSET && FRAME_FIELD(u8, slot, python->frame_entry);
	}
	to = python_frame(slot, n);
	to->code = code;
	to->offset = (s32)offset;
	to->flags = is_entry ? IG_FRAME_ENTRY : 0;
	slot->stack.n_python = n + 1;
	walk->hash = mix_word(walk->hash, code ^ (u64)offset << 48);
	return 0;
}

INLINE u64 walk_python(const struct ig_python *python, struct ig_slot *slot, struct task_struct *task, u64 hash)
{
	struct python_walk walk = {.python = python, .slot = slot, .hash = hash};
	u64 thread = find_python_thread(python, task);

	if (!thread) {
		slot->stack.flags |= IG_STACK_NO_PYTHON;
		return hash;
	}
	walk.frame = read_user_word(thread + python->thread_frame);
	if (walk.frame && python->cframe_frame != IG_NO_OFFSET)
		walk.frame = read_user_word(walk.frame + python->cframe_frame);
	REPEAT(walk_steps, walk_step, &walk);
	return walk.hash;
}

INLINE u64 build_stack(struct pt_regs *ctx, struct ig_slot *slot)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct ig_stack *stack = &slot->stack;
	u32 pid = task->tgid;
	struct ig_python *python = bpf_map_lookup_elem(&pythons, &pid);
	u64 image = mix_word(mix_word(pid, task->group_leader->start_boottime), task->self_exec_id);
	u64 hash;

	stack->n_python = 0;
	stack->flags = 0;
	stack->pid = pid;
	stack->tid = task->pid;
	hash = walk_native(ctx, slot, task, image);
	if (python)
		hash = walk_python(python, slot, task, hash);
	else
		stack->flags |= IG_STACK_NO_PYTHON;
	return mix_word(hash, stack->flags) | 1; /* 0 says that there is none */
}

/* Write a stack that was not seen before; whether user space has it or will. */
INLINE bool write_stack(struct ig_stack *stack)
{
	u8 yes = 1;

	if (!(stack->flags & IG_STACK_COPIED) && bpf_map_lookup_elem(&seen_stacks, &stack->id))
		return 1;
	stack->header.kind = IG_KIND_STACK;
	stack->header.version = IG_RECORD_VERSION;
	stack->header.size = sizeof(*stack);
	stack->header.mono_ns = bpf_ktime_get_ns();
	/* The reader is woken: code objects have to be read while the process is there. */
	if (bpf_ringbuf_output(&stacks, stack, sizeof(*stack), 0))
		return 0;
	if (!(stack->flags & IG_STACK_COPIED))
		bpf_map_update_elem(&seen_stacks, &stack->id, &yes, BPF_ANY);
	return 1;
}

/* The id of the stack that the thread has now; 0 when it was lost, which is counted. */
NOINLINE u64 capture_stack(struct pt_regs *ctx)
{
	struct ig_losses *lost;
	struct ig_slot *slot;
	u64 id = 0;

	for (u32 i = 0; i < IG_N_SLOTS; i++) {
		u32 key = i;

		slot = bpf_map_lookup_elem(&stack_slots, &key);
		if (!slot || __sync_val_compare_and_swap(&slot->is_taken, 0, 1))
			continue;
		id = build_stack(ctx, slot);
		if (slot->stack.flags & IG_STACK_COPIED)
			id = slot->stack.id; /* the copy's own */
		slot->stack.id = id;
		if (!write_stack(&slot->stack))
			id = 0;
		__sync_lock_test_and_set(&slot->is_taken, 0);
		break;
	}
	if (!id && (lost = losses_here()))
		ADD(lost->stacks_lost, 1);
	return id;
}

#endif
