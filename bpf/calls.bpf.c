/* Every probed library function, by two programs: one at entries and one at returns, attached by multi-uprobe links (Linux 6.6)
 * or by a perf event for each (5.15); functions of C++ by two that are attached at entries and at last instructions, and loaded with the first such
 * function that there is. Also the ABI that all objects share.
 */
#include "ingero/calls.h"

SEC("uprobe")
int calls_entry(struct pt_regs *ctx)
{
	ON_THREADS_STACK();
	on_entry(ctx, 0, 1);
	return 0;
}

SEC("uretprobe")
int calls_return(struct pt_regs *ctx)
{
	ON_THREADS_STACK();
	on_return(ctx);
	return 0;
}

SEC("uprobe")
int cxx_entry(struct pt_regs *ctx)
{
	ON_THREADS_STACK();
	on_entry(ctx, 1, 0);
	return 0;
}

SEC("uprobe")
int cxx_leave(struct pt_regs *ctx)
{
	ON_THREADS_STACK();
	on_leave(ctx);
	return 0;
}

/* Keeps every layout and number of the ABI in this object's BTF, where the Python side reads and checks them. */
const volatile struct {
	enum ig_kind kind;
	enum ig_source source;
	enum ig_flag flag;
	enum ig_host_op host_op;
	enum ig_io_op io_op;
	enum ig_tcp_op tcp_op;
	enum ig_net_op net_op;
	enum ig_act act;
	enum ig_role role;
	enum ig_selector selector;
	enum ig_limit limit;
	enum ig_off_cpu_reason reason;
	enum ig_process_event event;
	enum ig_stack_flag stack_flag;
	enum ig_python_frame_flag python_frame_flag;
	enum ig_unwind_kind unwind_kind;
	enum ig_stacks stacks;
	u32 reserved;
	struct ig_call call;
	struct ig_collective collective;
	struct ig_off_cpu off_cpu;
	struct ig_departure departure;
	struct ig_process process;
	struct ig_block block;
	struct ig_tcp tcp;
	struct ig_stack stack;
	struct ig_stack_copy stack_copy;
	struct ig_span span;
	struct ig_unfinished unfinished;
} abi SEC(".rodata");

char LICENSE[] SEC("license") = "GPL";
