/* Every probed library function, by one program: it serves entry and return of one multi-uprobe session link (Linux 6.13).
 *
 * An object of its own: a kernel without this function, asked by a process without CAP_SYS_ADMIN, loads nothing that names it.
 */
#include "ingero/calls.h"

extern int bpf_session_is_return(void) KSYM;

SEC("uprobe")
int calls_session(struct pt_regs *ctx)
{
	if (bpf_session_is_return()) {
		on_return(ctx);
		return 0;
	}
	return !on_entry(ctx); /* non-zero: do not call us at the return */
}

char LICENSE[] SEC("license") = "GPL";
