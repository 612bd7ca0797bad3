/* Arguments of a probed function, fetched as a descriptor says. */
#ifndef INGERO_ARGUMENTS_H
#define INGERO_ARGUMENTS_H

#include "ingero/record.h"

struct ig_registers {
	u64 value[IG_N_REGS];
	u64 stack; /* address of the first argument passed in memory */
};

#if defined(__TARGET_ARCH_x86)
/* System V x86-64 psABI 3.2.3: rdi rsi rdx rcx r8 r9, then the stack above the return address. */
INLINE void read_registers(struct pt_regs *ctx, struct ig_registers *regs)
{
	regs->value[0] = ctx->di;
	regs->value[1] = ctx->si;
	regs->value[2] = ctx->dx;
	regs->value[3] = ctx->cx;
	regs->value[4] = ctx->r8;
	regs->value[5] = ctx->r9;
	regs->value[6] = 0;
	regs->value[7] = 0;
	regs->stack = ctx->sp + 8;
}

INLINE u64 return_value(struct pt_regs *ctx)
{
	return ctx->ax;
}

INLINE u64 frame_pointer(struct pt_regs *ctx)
{
	return ctx->bp;
}

INLINE u64 instruction_pointer(struct pt_regs *ctx)
{
	return ctx->ip;
}

/* At a function's entry, before a return probe replaces it. */
INLINE u64 return_address(struct pt_regs *ctx)
{
	u64 address = 0;

	if (bpf_probe_read_user(&address, sizeof(address), (void *)ctx->sp))
		return 0;
	return address;
}
#else
/* AAPCS64: x0..x7, then the stack. */
INLINE void read_registers(struct pt_regs *ctx, struct ig_registers *regs)
{
	for (u32 i = 0; i < IG_N_REGS; i++)
		regs->value[i] = ctx->regs[i];
	regs->stack = ctx->sp;
}

INLINE u64 return_value(struct pt_regs *ctx)
{
	return ctx->regs[0];
}

INLINE u64 frame_pointer(struct pt_regs *ctx)
{
	return ctx->regs[29];
}

INLINE u64 instruction_pointer(struct pt_regs *ctx)
{
	return ctx->pc;
}

INLINE u64 return_address(struct pt_regs *ctx)
{
	return ctx->regs[30];
}
#endif

/* The argument in one role; 0 when the function has none or its memory cannot be read. */
NOINLINE u64 argument(const struct ig_registers *regs, u32 sel)
{
	u32 place = sel & IG_SEL_PLACE;
	u64 value = 0, address;

	if (!place)
		return 0;
	if (place <= IG_N_REGS) {
		value = regs->value[(place - 1) & (IG_N_REGS - 1)];
	} else {
		address = regs->stack + 8 * (u64)(place - IG_N_REGS - 1);
		if (sel & IG_SEL_ADDRESS)
			return address;
		if (bpf_probe_read_user(&value, sizeof(value), (void *)address))
			return 0;
	}
	if (sel & IG_SEL_DEREF) {
		address = value + 4 * (u64)(sel >> IG_SEL_OFFSET_SHIFT);
		value = 0;
		if (sel & IG_SEL_32)
			bpf_probe_read_user(&value, 4, (void *)address);
		else
			bpf_probe_read_user(&value, 8, (void *)address);
	}
	if (sel & IG_SEL_HIGH)
		return value >> 32;
	if (sel & IG_SEL_32)
		return (u64)(s64)(s32)value;
	return value;
}

/* The same; most functions lack most roles, so the call is spared where there is none. */
INLINE u64 fetch(const struct ig_registers *regs, u32 sel)
{
	return sel ? argument(regs, sel) : 0;
}

#endif
