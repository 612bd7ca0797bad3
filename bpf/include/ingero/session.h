/* The program of session links; the includer says with is_return() whether this is the return, for the kernel's function changed. */
#ifndef INGERO_SESSION_H
#define INGERO_SESSION_H

#include "ingero/calls.h"

INLINE bool is_return(struct pt_regs *ctx);

SEC("uprobe")
int calls_session(struct pt_regs *ctx)
{
	ON_THREADS_STACK();
	if (is_return(ctx)) {
		on_return(ctx);
		return 0;
	}
	return !on_entry(ctx, 0, 0); /* non-zero: do not call us at the return */
}

#endif
