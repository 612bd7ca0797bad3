/* Every probed library function, by one program: it serves entry and return of one multi-uprobe session link (Linux 6.13). Functions of C++
 * are left to calls.bpf.c: their return addresses are never replaced.
 *
 * An object of its own: a kernel without this function, asked by a process without CAP_SYS_ADMIN, loads nothing that names it.
 */
#include "ingero/session.h"

extern int bpf_session_is_return(void) KSYM;

INLINE bool is_return(UNUSED struct pt_regs *ctx)
{
	return bpf_session_is_return();
}

char LICENSE[] SEC("license") = "GPL";
