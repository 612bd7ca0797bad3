/* What happens when a probed function is entered and when it returns, whichever way it is probed.
 *
 * User space fills `descriptors` and attaches with the index as cookie. Every thread has a stack of frames in `threads`,
 * so nesting is exact and a call that hangs can be seen from outside.
 */
#ifndef INGERO_CALLS_H
#define INGERO_CALLS_H

#include "ingero/counts.h"
#include "ingero/gloo.h"
#include "ingero/stacks.h"

struct {
	MAP_UINT(type, BPF_MAP_TYPE_ARRAY);
	MAP_UINT(max_entries, IG_MAX_DESCRIPTORS);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct ig_descriptor);
} descriptors SEC(".maps");

/* Size of every live device allocation, so that a free knows what it freed. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(max_entries, 262144);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, struct ig_handle_key);
	MAP_TYPE(value, u64);
} allocations SEC(".maps");

/* The device of every context that was seen to be opened. A process opens one for each device that it uses. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(max_entries, 4096);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, struct ig_handle_key);
	MAP_TYPE(value, s32);
} contexts SEC(".maps");

/* Exact counts of copies that succeeded, by direction. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	MAP_UINT(max_entries, IG_N_COPY_KINDS);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct ig_count);
} copies SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 8 << 20);
} calls SEC(".maps");

/* Calls that are kept whatever the sampling have a lane of their own: a storm of launches cannot push them out. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 4 << 20);
} kept_calls SEC(".maps");

/* So have failed calls, and user space is woken for them. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 256 << 10);
} failed_calls SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 2 << 20);
} collectives SEC(".maps");

static const struct ig_thread ZERO_THREAD = {.device = -1};

INLINE struct ig_thread *thread_here(u64 pid_tgid, bool create)
{
	u32 tid = (u32)pid_tgid, pid = pid_tgid >> 32;
	struct ig_thread *thread = bpf_map_lookup_elem(&threads, &tid);
	struct ig_losses *lost;
	u64 now;

	if (LIKELY(thread) || !create)
		return thread;
	bpf_map_update_elem(&threads, &tid, &ZERO_THREAD, BPF_NOEXIST);
	thread = bpf_map_lookup_elem(&threads, &tid);
	if (!thread) {
		if ((lost = losses_here()))
			ADD(lost->no_thread, 1);
		return 0;
	}
	thread->pid = pid;
	thread->pointer = thread_pointer(bpf_get_current_task_btf());
	if (!bpf_map_lookup_elem(&gpu_pids, &pid)) {
		now = bpf_ktime_get_ns();
		add_process(&gpu_pids, pid, &now);
	}
	return thread;
}

INLINE void read_arguments(struct ig_frame *frame, const struct ig_descriptor *desc, const struct ig_registers *regs)
{
	frame->bytes = fetch(regs, desc->args[IG_ARG_SIZE0]);
	if (desc->args[IG_ARG_SIZE1])
		frame->bytes *= fetch(regs, desc->args[IG_ARG_SIZE1]);
	if (desc->args[IG_ARG_SIZE2])
		frame->bytes *= fetch(regs, desc->args[IG_ARG_SIZE2]);
	frame->handle = fetch(regs, desc->args[IG_ARG_HANDLE]);
	frame->stream = fetch(regs, desc->args[IG_ARG_STREAM]);
	frame->aux = fetch(regs, desc->args[IG_ARG_AUX]);
	frame->out = fetch(regs, desc->args[IG_ARG_OUT]);
	frame->grid_x = fetch(regs, desc->args[IG_ARG_GRID_X]);
	frame->grid_y = fetch(regs, desc->args[IG_ARG_GRID_Y]);
	frame->grid_z = fetch(regs, desc->args[IG_ARG_GRID_Z]);
	frame->block_x = fetch(regs, desc->args[IG_ARG_BLOCK_X]);
	frame->block_y = fetch(regs, desc->args[IG_ARG_BLOCK_Y]);
	frame->block_z = fetch(regs, desc->args[IG_ARG_BLOCK_Z]);
}

INLINE void act_at_entry(struct ig_frame *frame, const struct ig_descriptor *desc, struct ig_thread *thread)
{
	struct ig_handle_key key = {.handle = frame->handle, .pid = thread->pid};
	u64 *bytes;

	switch (desc->act) {
	case IG_ACT_FREE:
		bytes = bpf_map_lookup_elem(&allocations, &key);
		frame->bytes = bytes ? *bytes : 0;
		break;
	case IG_ACT_GROUP_START:
		if (!thread->group_depth++)
			thread->group_id++;
		break;
	case IG_ACT_GROUP_END:
		if (thread->group_depth)
			thread->group_depth--;
		break;
	default:
		break;
	}
	if (thread->group_depth)
		frame->flags |= IG_FLAG_GROUPED;
}

NOINLINE void act_at_success(struct ig_frame *frame, const struct ig_descriptor *desc, struct ig_thread *thread)
{
	struct ig_handle_key key = {.pid = thread->pid};
	struct ig_losses *lost;
	s32 device = (s32)frame->aux, *known;

	switch (desc->act) {
	case IG_ACT_OUT:
		bpf_probe_read_user(&frame->handle, sizeof(frame->handle), (void *)frame->out);
		break;
	case IG_ACT_ALLOC:
		bpf_probe_read_user(&frame->handle, sizeof(frame->handle), (void *)frame->out);
		key.handle = frame->handle;
		if (bpf_map_update_elem(&allocations, &key, &frame->bytes, BPF_ANY) && (lost = losses_here()))
			ADD(lost->allocs_full, 1);
		break;
	case IG_ACT_FREE:
		key.handle = frame->handle;
		bpf_map_delete_elem(&allocations, &key);
		break;
	case IG_ACT_SET_DEVICE:
		thread->device = device;
		break;
	case IG_ACT_OPEN_CONTEXT:
		bpf_probe_read_user(&frame->handle, sizeof(frame->handle), (void *)frame->out);
		key.handle = frame->handle;
		if (bpf_map_update_elem(&contexts, &key, &device, BPF_ANY) && (lost = losses_here()))
			ADD(lost->contexts_full, 1);
		break;
	case IG_ACT_SET_CONTEXT:
		key.handle = frame->handle;
		known = bpf_map_lookup_elem(&contexts, &key);
		/* One that was opened before we looked: the runtime, which sets it within its own calls, names the device in others. */
		if (known || !(frame->flags & IG_FLAG_NESTED))
			thread->device = known ? *known : -1;
		break;
	default:
		nccl_return(frame, desc->act, thread);
		break;
	}
}

INLINE void write_call(const struct ig_frame *frame, const struct ig_thread *thread, struct ig_count *count,
		       struct ig_choice choice, u64 duration_ns, s32 rc, u64 stack_id)
{
	struct ig_call *record = 0;

	if (choice.flags & IG_FLAG_ERROR)
		record = bpf_ringbuf_reserve(&failed_calls, sizeof(*record), 0);
	if (!record && choice.flags & (IG_FLAG_EXACT | IG_FLAG_SLOW | IG_FLAG_LARGE))
		record = bpf_ringbuf_reserve(&kept_calls, sizeof(*record), 0);
	if (!record)
		record = bpf_ringbuf_reserve(&calls, sizeof(*record), 0);
	if (!record) {
		choice_lost(count, choice);
		return;
	}
	record->header.kind = IG_KIND_CALL;
	record->header.version = IG_RECORD_VERSION;
	record->header.size = sizeof(*record);
	record->header.mono_ns = frame->entry_ns;
	record->duration_ns = duration_ns;
	record->cgroup_id = bpf_get_current_cgroup_id();
	record->bytes = frame->bytes;
	record->handle = frame->handle;
	record->stream = frame->stream;
	record->aux = frame->aux;
	record->pid = thread->pid;
	record->tid = (u32)bpf_get_current_pid_tgid();
	record->rc = rc;
	record->weight = choice.weight;
	record->grid_x = frame->grid_x;
	record->grid_y = frame->grid_y;
	record->grid_z = frame->grid_z;
	record->block_x = frame->block_x;
	record->block_y = frame->block_y;
	record->block_z = frame->block_z;
	record->cpu = bpf_get_smp_processor_id();
	record->op = frame->op;
	record->device = thread->device;
	record->source = frame->source;
	record->flags = choice.flags;
	record->depth = thread->depth;
	record->reserved = 0;
	record->stack_id = stack_id;
	bpf_get_current_comm(record->comm, sizeof(record->comm));
	/* The reader looks on a timer: a wake-up per call would cost more than the call. */
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}

INLINE void write_collective(const struct ig_frame *frame, const struct ig_thread *thread, struct ig_count *count,
			     struct ig_choice choice, u64 duration_ns, s32 rc, u64 stack_id)
{
	struct ig_collective *record = bpf_ringbuf_reserve(&collectives, sizeof(*record), 0);

	if (!record) {
		choice_lost(count, choice);
		return;
	}
	record->header.kind = IG_KIND_COLLECTIVE;
	record->header.version = IG_RECORD_VERSION;
	record->header.size = sizeof(*record);
	record->header.mono_ns = frame->entry_ns;
	record->duration_ns = duration_ns;
	record->cgroup_id = bpf_get_current_cgroup_id();
	record->comm_hash = frame->comm_hash;
	record->comm_ptr = frame->comm_ptr;
	record->stream = frame->stream;
	record->seq = frame->seq;
	record->count = frame->count;
	record->bytes = frame->bytes;
	record->pid = thread->pid;
	record->tid = (u32)bpf_get_current_pid_tgid();
	record->rc = rc;
	record->weight = choice.weight;
	record->rank = frame->rank;
	record->nranks = frame->nranks;
	record->peer = frame->peer;
	record->group_id = frame->flags & IG_FLAG_GROUPED ? thread->group_id : 0;
	record->op = frame->op;
	record->device = thread->device;
	record->cpu = bpf_get_smp_processor_id();
	record->dtype = frame->dtype;
	record->redop = frame->redop;
	record->source = frame->source;
	record->flags = choice.flags;
	record->depth = thread->depth;
	record->stack_id = stack_id;
	__builtin_memset(record->reserved, 0, sizeof(record->reserved));
	bpf_get_current_comm(record->comm, sizeof(record->comm));
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}

INLINE void count_copy(const struct ig_frame *frame, const struct ig_descriptor *desc, u64 duration_ns)
{
	u64 kind = desc->act == IG_ACT_COPY ? frame->aux : desc->act - IG_ACT_COPY;
	u32 index = kind < IG_N_COPY_KINDS ? kind : IG_N_COPY_KINDS - 1, bucket = bucket_of(duration_ns);
	struct ig_count *count = bpf_map_lookup_elem(&copies, &index);

	if (!count)
		return;
	/* One for each CPU, but a thread may be preempted in here by another of the same CPU. */
	ADD(count->seen, 1);
	ADD(count->bytes, frame->bytes);
	ADD(count->total_ns, duration_ns);
	if (bucket < IG_HIST_BUCKETS)
		ADD(count->hist[bucket], 1);
}

/* Whether a record is to carry its stack. */
INLINE bool wants_stack(struct ig_count *count, const struct ig_settings *now, u8 flags, u64 end_ns)
{
	if (now->stacks != IG_STACKS_NOTABLE)
		return now->stacks == IG_STACKS_ALL;
	if (!(flags & (IG_FLAG_SLOW | IG_FLAG_ERROR)))
		return 0;
	turn_window(count, end_ns);
	if (count->n_stacks >= IG_MOST_STACKS)
		return 0;
	ADD(count->n_stacks, 1);
	return 1;
}

INLINE void finish(struct pt_regs *ctx, struct ig_frame *frame, const struct ig_descriptor *desc,
		   struct ig_thread *thread, const struct ig_settings *now, u64 duration_ns, s32 rc)
{
	struct ig_count *count = count_of(thread->pid, frame->source, frame->op);
	struct finished call = {
		.end_ns = frame->entry_ns + duration_ns,
		.duration_ns = duration_ns,
		.bytes = frame->flags & IG_FLAG_ERROR ? 0 : frame->bytes,
		.flags = frame->flags,
	};
	struct ig_choice choice;
	u64 stack_id = 0;

	if (frame->copy == 1 && !(frame->flags & IG_FLAG_ERROR))
		count_copy(frame, desc, duration_ns);
	if (!count)
		return;
	call.flags |= exact_flag(now, frame->source, frame->op);
	if (frame->bytes >= IG_LARGE_BYTES)
		call.flags |= IG_FLAG_LARGE;
	choice = choose(count, now, &call);
	if (!choice.weight)
		return;
	if (ctx && wants_stack(count, now, choice.flags, call.end_ns))
		stack_id = capture_stack(ctx);
	if (desc->is_collective)
		write_collective(frame, thread, count, choice, duration_ns, rc, stack_id);
	else
		write_call(frame, thread, count, choice, duration_ns, rc, stack_id);
}

/* Whether to keep where the caller's frame begins. Of sampled kinds only where all stacks are wanted: it is one more access to
 * user memory, and launches are many.
 */
INLINE bool keeps_caller(const struct ig_settings *now, const struct ig_descriptor *desc)
{
	return desc->needs_return && (now->stacks == IG_STACKS_ALL ||
				      (now->stacks && exact_flag(now, desc->source, desc->op)));
}

/* Takes the innermost call off the thread's stack when it is a C++ call whose frame is gone: an exception left it. Returns 1 when it did.
 * end_ns: when the exception was caught; 0 when nobody knows.
 */
int drop_left(u64 stack, u64 end_ns);
GLOBAL int drop_left(u64 stack, u64 end_ns)
{
	struct ig_thread *thread = thread_here(bpf_get_current_pid_tgid(), 0);
	struct ig_settings *now = settings_now();
	struct ig_descriptor *desc;
	struct ig_frame *frame;
	u32 depth, index;

	if (!thread || !now)
		return 0;
	depth = thread->depth;
	if (!depth || depth > IG_MAX_DEPTH)
		return 0;
	frame = &thread->frames[(depth - 1) & (IG_MAX_DEPTH - 1)];
	if (frame->source != IG_SOURCE_GLOO || frame->sp > stack)
		return 0;
	thread->depth = depth - 1;
	index = frame->descriptor;
	desc = bpf_map_lookup_elem(&descriptors, &index);
	if (!desc || !frame->entry_ns)
		return 1;
	frame->flags |= end_ns ? IG_FLAG_ERROR : IG_FLAG_ERROR | IG_FLAG_NO_TIME;
	/* Without a stack: the thread is not in the call any more. It would not fit either: 512 bytes are for all functions in a row. */
	finish(0, frame, desc, thread, now, end_ns ? end_ns - frame->entry_ns : 0, -1);
	frame->entry_ns = 0;
	return 1;
}

INLINE void drop_all_left(u64 stack, u64 end_ns)
{
	for (u32 i = 0; i < IG_MAX_DEPTH; i++)
		if (!drop_left(stack, end_ns))
			break;
}

/* First in every program that a uprobe runs. Since Linux 6.13 (arm64: 6.17) the JIT gives a program of this type one stack for each CPU, as
 * if nothing could run it there twice at a time; but a uprobe's thread may be preempted in it, the next one writes over its pointers,
 * and the kernel dies (open-telemetry/opentelemetry-ebpf-instrumentation#3056; seen on 7.2). A program with a tail call has no such
 * stack. Whether it has one is asked before the verifier drops a branch that is never taken, so nothing is called.
 */
#define ON_THREADS_STACK() asm volatile("r0 = 0\n\tif r0 == 0 goto +1\n\tcall 12" ::: "r0")

/* Whether the innermost call goes on in this function, which is the same operation: __cudaLaunchKernel jumps to cudaLaunchKernel,
 * cudaGraphLaunch calls cuGraphLaunch, a library that stands in for NVIDIA's calls the function of the same name in that one. Where it is
 * the same function again, or lies further out, the call was left without a return; a collective of another communicator is another.
 */
INLINE bool goes_on(const struct ig_frame *call, u64 function, const struct ig_descriptor *desc,
		    const struct ig_registers *regs)
{
	return call->op == desc->op && call->source == desc->source && call->function != function &&
	       regs->stack <= call->sp &&
	       (!desc->is_collective || argument(regs, desc->args[IG_ARG_COMM]) == call->comm_ptr);
}

/* The return of a function in which the innermost call goes on will come all the same. */
INLINE void expect_return(struct ig_frame *call, u64 stack)
{
	if (call->sp == stack)
		call->n_jumps++;
	else
		call->has_inner = 1;
}

/* Returns 1 when the call's return must be seen too. all_return: returns come of every function that has a return probe. */
INLINE int on_entry(struct pt_regs *ctx, bool is_cxx, bool all_return)
{
	u64 pid_tgid = bpf_get_current_pid_tgid();
	struct ig_settings *now = settings_now();
	u64 function = instruction_pointer(ctx);
	u32 index = bpf_get_attach_cookie(ctx), depth;
	struct ig_descriptor *desc = bpf_map_lookup_elem(&descriptors, &index);
	struct ig_registers regs;
	struct ig_thread *thread;
	struct ig_count *count;
	struct ig_losses *lost;
	struct ig_frame *frame, *outer;

	if (!desc || !now ||
	    !is_watched(now, pid_tgid >> 32, now->filter & 2 ? bpf_get_current_cgroup_id() : 0,
			(u32)bpf_get_current_uid_gid()))
		return 0;
	thread = thread_here(pid_tgid, 1);
	if (!thread)
		return 0;
	read_registers(ctx, &regs);
	if (is_cxx)
		drop_all_left(regs.stack, desc->act == IG_ACT_GLOO_CAUGHT ? bpf_ktime_get_ns() : 0);
	depth = thread->depth;
	outer = &thread->frames[(depth - 1) & (IG_MAX_DEPTH - 1)];
	if (!is_cxx && depth && goes_on(outer, function, desc, &regs)) {
		if (all_return && desc->needs_return)
			expect_return(outer, regs.stack);
		return 0;
	}
	if (depth >= IG_MAX_DEPTH) {
		if ((lost = losses_here()))
			ADD(lost->too_deep, 1);
		return 0;
	}
	frame = &thread->frames[depth & (IG_MAX_DEPTH - 1)];
	frame->descriptor = index;
	frame->function = function;
	frame->op = desc->op;
	frame->source = desc->source;
	frame->sp = regs.stack;
	frame->flags = depth ? IG_FLAG_NESTED : 0;
	frame->copy = depth && outer->copy ? 2 : desc->act >= IG_ACT_COPY;
	frame->has_inner = 0;
	frame->n_jumps = 0;
	read_arguments(frame, desc, &regs);
	act_at_entry(frame, desc, thread);
	if (is_cxx) {
		if (!gloo_entry(frame, desc, &regs, thread)) {
			frame->entry_ns = 0;
			return 0;
		}
	} else if (desc->is_collective) {
		nccl_entry(frame, outer, desc, &regs, thread->pid);
	}
	if ((count = count_of(thread->pid, desc->source, desc->op)))
		ADD(count->entered, 1);
	if (keeps_caller(now, desc)) {
		frame->return_pc = return_address(ctx);
		frame->bp = frame_pointer(ctx);
	} else {
		frame->return_pc = 0;
	}
	frame->entry_ns = bpf_ktime_get_ns();
	if (!desc->needs_return) {
		frame->flags |= IG_FLAG_NO_TIME;
		finish(ctx, frame, desc, thread, now, 0, 0);
		frame->entry_ns = 0;
		return 0;
	}
	thread->depth = depth + 1;
	return 1;
}

/* A C++ function is about to be left: this is the last instruction of it, where the stack is as it was at its entry. One that looks like it
 * and is not, such as a jump inside of it, finds another stack. A return probe would end the process at the first exception.
 */
INLINE void on_leave(struct pt_regs *ctx)
{
	struct ig_thread *thread = thread_here(bpf_get_current_pid_tgid(), 0);
	struct ig_settings *now = settings_now();
	u64 now_ns = bpf_ktime_get_ns();
	struct ig_descriptor *desc;
	struct ig_registers regs;
	struct ig_frame *frame;
	u32 depth, index;

	if (!thread || !now)
		return;
	read_registers(ctx, &regs);
	drop_all_left(regs.stack - 1, 0);
	depth = thread->depth;
	if (!depth || depth > IG_MAX_DEPTH)
		return;
	frame = &thread->frames[(depth - 1) & (IG_MAX_DEPTH - 1)];
	if (frame->source != IG_SOURCE_GLOO || frame->sp != regs.stack || !frame->entry_ns)
		return;
	index = frame->descriptor;
	desc = bpf_map_lookup_elem(&descriptors, &index);
	thread->depth = depth - 1;
	if (desc)
		finish(ctx, frame, desc, thread, now, now_ns - frame->entry_ns, 0);
	frame->entry_ns = 0;
}

/* Pops frames until the one whose stack pointer matches: calls left by longjmp or an exception go with it. Returns 1 when it is there: it lies
 * at the depth that is left. A function in which a call goes on (goes_on()) returns before that call does, and pops nothing.
 *
 * A function, and its result only a yes or no: the verifier would go through all that follows once for each depth.
 */
NOINLINE int pop_to(struct ig_thread *thread, u64 stack)
{
	struct ig_frame *frame = 0;
	struct ig_losses *lost;
	u32 depth;

	for (u32 i = 0; i < IG_MAX_DEPTH; i++) {
		depth = thread->depth;
		if (!depth || depth > IG_MAX_DEPTH)
			break;
		frame = &thread->frames[(depth - 1) & (IG_MAX_DEPTH - 1)];
		if (depth == IG_MAX_DEPTH && frame->sp > stack) /* nested deeper: it was counted at its entry, and has no frame */
			return 0;
		if (frame->has_inner && frame->sp > stack)
			return 0;
		if (frame->n_jumps && frame->sp == stack) {
			frame->n_jumps--;
			return 0;
		}
		thread->depth = depth - 1;
		if (frame->sp == stack) {
			if (frame->entry_ns)
				return 1;
			break;
		}
		frame->entry_ns = 0;
	}
	if ((lost = losses_here()))
		ADD(lost->unmatched, 1);
	return 0;
}

INLINE void on_return(struct pt_regs *ctx)
{
	struct ig_thread *thread = thread_here(bpf_get_current_pid_tgid(), 0);
	struct ig_settings *now = settings_now();
	u64 now_ns = bpf_ktime_get_ns();
	struct ig_descriptor *desc;
	struct ig_frame *frame = 0;
	struct ig_losses *lost;
	s32 rc = (s32)return_value(ctx);
	u64 stack = ctx->sp; /* where the arguments in memory began: the return address is gone again */
	u32 depth, index;

	if (!thread || !now) /* when tracing is over, what has not returned stays in flight */
		return;
	if (!pop_to(thread, stack))
		return;
	frame = &thread->frames[thread->depth & (IG_MAX_DEPTH - 1)];
	index = frame->descriptor;
	desc = bpf_map_lookup_elem(&descriptors, &index);
	if (!desc)
		return;
	if (rc && rc != desc->pending_rc)
		frame->flags |= IG_FLAG_ERROR;
	else
		act_at_success(frame, desc, thread);
	finish(ctx, frame, desc, thread, now, now_ns - frame->entry_ns, rc);
	frame->entry_ns = 0;
}

#endif
