/* The few kernel types and helpers that our programs touch, written by hand.
 *
 * Types carry preserve_access_index, so libbpf moves every field to where the running kernel keeps it (CO-RE); only
 * the names and types here matter, not the order. A field that the kernel lacks fails the load of that one program.
 * Helper numbers are kernel UAPI (include/uapi/linux/bpf.h, enum bpf_func_id) and never change.
 */
#ifndef INGERO_KERNEL_H
#define INGERO_KERNEL_H

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;
typedef _Bool bool;

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
/* The verifier looks at such a function once, for whatever its arguments may be, and not again at each call: they and its result are numbers. */
#define GLOBAL __attribute__((noinline))
#define KSYM __attribute__((section(".ksyms")))
#define WEAK __attribute__((weak))
#define CORE __attribute__((preserve_access_index))
/* What the running kernel says of a field; Clang, BPFCoreSharedInfo.def. A bit field has no address: it is read by these. */
#define FIELD_INFO(field, kind) __builtin_preserve_field_info(field, kind)
enum { FIELD_BYTE_OFFSET = 0, FIELD_BYTE_SIZE = 1, FIELD_EXISTS = 2, FIELD_LSHIFT = 4, FIELD_RSHIFT = 5 };
#define UNUSED __attribute__((unused))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* At most as many steps as an array has elements, until one returns 1: bpf_loop() is of Linux 5.17 only, this of 5.13.
 *
 * Linux before 6.8 verifies a step once, with what it knows of the context before the first, and removes the branches that the first
 * does not take. So a field that a step changes and decides by must not begin as a constant: read it from memory.
 */
#define REPEAT(array, step, ctx) bpf_for_each_map_elem(&array, step, ctx, 0)
#define STEP(name, context) static long name(UNUSED void *array_, UNUSED u32 *i_, UNUSED void *none_, context)
#define REPEATS(name, n)                                                                                               \
	struct {                                                                                                       \
		MAP_UINT(type, BPF_MAP_TYPE_ARRAY);                                                                    \
		MAP_UINT(max_entries, n);                                                                              \
		MAP_TYPE(key, u32);                                                                                    \
		MAP_TYPE(value, u8);                                                                                   \
	} name SEC(".maps")

/* BTF-defined maps: libbpf reads the numbers from the pointed-to array lengths. */
#define MAP_UINT(name, value) int(*name)[value]
#define MAP_TYPE(name, type_) typeof(type_) *name

enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_HASH = 5,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_SK_STORAGE = 24,
	BPF_MAP_TYPE_RINGBUF = 27,
	BPF_MAP_TYPE_TASK_STORAGE = 29,
};

enum { BPF_ANY = 0, BPF_NOEXIST = 1, BPF_F_NO_PREALLOC = 1, BPF_RB_NO_WAKEUP = 1, BPF_F_USER_STACK = 256 };
enum { BPF_LOCAL_STORAGE_GET_F_CREATE = 1 };

static void *(*bpf_map_lookup_elem)(const void *map, const void *key) = (void *)1;
static long (*bpf_map_update_elem)(const void *map, const void *key, const void *value, u64 flags) = (void *)2;
static long (*bpf_map_delete_elem)(const void *map, const void *key) = (void *)3;
static u64 (*bpf_ktime_get_ns)(void) = (void *)5;
static u32 (*bpf_get_smp_processor_id)(void) = (void *)8;
static u64 (*bpf_get_current_pid_tgid)(void) = (void *)14;
static u64 (*bpf_get_current_uid_gid)(void) = (void *)15;
static long (*bpf_get_current_comm)(void *to, u32 size) = (void *)16;
static u64 (*bpf_get_current_cgroup_id)(void) = (void *)80;
static long (*bpf_get_stack)(void *ctx, void *to, u32 size, u64 flags) = (void *)67;
static long (*bpf_probe_read_user)(void *to, u32 size, const void *from) = (void *)112;
static long (*bpf_probe_read_kernel)(void *to, u32 size, const void *from) = (void *)113;
static void *(*bpf_sk_storage_get)(void *map, void *sock, void *value, u64 flags) = (void *)107;
static long (*bpf_ringbuf_output)(void *ring, const void *data, u64 size, u64 flags) = (void *)130;
static void *(*bpf_ringbuf_reserve)(void *ring, u64 size, u64 flags) = (void *)131;
static void (*bpf_ringbuf_submit)(void *record, u64 flags) = (void *)132;
static void *(*bpf_task_storage_get)(void *map, void *task, void *value, u64 flags) = (void *)156;
static struct task_struct *(*bpf_get_current_task_btf)(void) = (void *)158;
static u64 (*bpf_get_attach_cookie)(void *ctx) = (void *)174;
static long (*bpf_for_each_map_elem)(void *map, void *step, void *ctx, u64 flags) = (void *)164;

/* Registers of the probed user thread (UAPI bpf_user_pt_regs_t; asm/ptrace.h of each architecture). */
#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp, ss;
};
#elif defined(__TARGET_ARCH_arm64)
struct pt_regs {
	unsigned long regs[31], sp, pc, pstate;
};
#else
#error "define __TARGET_ARCH_x86 or __TARGET_ARCH_arm64"
#endif

#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpadded" /* the kernel's layouts, not ours */

struct kernfs_node {
	u64 id;
} CORE;

struct cgroup {
	struct kernfs_node *kn;
} CORE;

struct css_set {
	struct cgroup *dfl_cgrp;
} CORE;

struct signal_struct {
	struct {
		s32 counter;
	} live;
	s32 group_exit_code;
} CORE;

struct kuid {
	u32 val;
} CORE;

struct cred {
	struct kuid uid;
} CORE;

#if defined(__TARGET_ARCH_x86)
struct thread_struct {
	unsigned long fsbase;
} CORE;
#else
struct thread_struct {
	struct {
		unsigned long tp_value;
	} uw;
} CORE;
#endif

struct return_instance {
	unsigned long stack;
	unsigned long orig_ret_vaddr;
	struct return_instance *next;
} CORE;

struct uprobe_task {
	struct return_instance *return_instances;
} CORE;

struct mm_struct {
	unsigned long task_size;
} CORE;

struct task_struct {
	s32 pid;
	s32 tgid;
	s32 exit_code;
	u32 flags;
	u32 __state;
	u32 frozen : 1;
	char comm[16];
	struct css_set *cgroups;
	struct signal_struct *signal;
	const struct cred *cred;
	struct task_struct *group_leader;
	u64 start_boottime;
	u64 self_exec_id;
	struct uprobe_task *utask;
	struct mm_struct *mm;
	struct thread_struct thread;
} CORE;

struct gendisk {
	s32 major;
	s32 first_minor;
} CORE;

struct request_queue {
	struct gendisk *disk;
} CORE;

struct request {
	struct request_queue *q;
	u32 cmd_flags;
	u32 __data_len;
	u64 __sector;
} CORE;

struct in6_addr {
	union {
		u8 u6_addr8[16];
	} in6_u;
} CORE;

struct sock_common {
	u32 skc_daddr;
	u32 skc_rcv_saddr;
	u16 skc_dport;
	u16 skc_num;
	u16 skc_family;
	volatile u8 skc_state;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
} CORE;

struct sock {
	struct sock_common __sk_common;
} CORE;

struct socket {
	struct sock *sk;
} CORE;

#pragma clang diagnostic pop

#endif
