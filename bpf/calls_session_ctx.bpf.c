/* As calls_session.bpf.c, for kernels whose function takes the context: Linux 7.0, with sessions of functions (fsession). */
#include "ingero/session.h"

extern int bpf_session_is_return(void *ctx) KSYM;

INLINE bool is_return(struct pt_regs *ctx)
{
	return bpf_session_is_return(ctx);
}

char LICENSE[] SEC("license") = "GPL";
