/* TCP segments sent again, IPv4 and IPv6.
 *
 * The kernel sends again from a timer or an interrupt, so who runs then says nothing. With a filter it is remembered with
 * each socket who used it last, when data is sent or received or a connection begins; a socket that nobody watched has
 * used is left out. Without a filter all are told and nothing is remembered.
 */
#include "ingero/host.h"

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 256 << 10);
} retransmits SEC(".maps");

/* Who used a socket last and is watched; the kernel frees it with the socket. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_SK_STORAGE);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, s32);
	MAP_TYPE(value, u32);
} owners SEC(".maps");

enum { AF_INET = 2, AF_INET6 = 10 };

/* In the context of whoever uses the socket. */
INLINE void note_owner(struct sock *sock)
{
	bool is_ours = is_watched_task(bpf_get_current_task_btf());
	u32 *owner = bpf_sk_storage_get(&owners, sock, 0, is_ours ? BPF_LOCAL_STORAGE_GET_F_CREATE : 0);

	if (owner)
		*owner = is_ours ? bpf_get_current_pid_tgid() >> 32 : 0;
}

/* TP_PROTO(struct sock *sk, int ret, int flags), Linux 6.3. Loaded with a filter only. */
SEC("tp_btf/sock_send_length")
int tcp_sent(u64 *ctx)
{
	note_owner((struct sock *)ctx[0]);
	return 0;
}

SEC("tp_btf/sock_recv_length")
int tcp_received(u64 *ctx)
{
	note_owner((struct sock *)ctx[0]);
	return 0;
}

/* int tcp_sendmsg(struct sock *sk, struct msghdr *msg, size_t size), before Linux 6.3. */
SEC("fentry/tcp_sendmsg")
int tcp_sent_fentry(u64 *ctx)
{
	note_owner((struct sock *)ctx[0]);
	return 0;
}

/* int tcp_recvmsg(struct sock *sk, ...). */
SEC("fentry/tcp_recvmsg")
int tcp_received_fentry(u64 *ctx)
{
	note_owner((struct sock *)ctx[0]);
	return 0;
}

enum { TCP_SYN_SENT = 2 };

/* TP_PROTO(const struct sock *sk, const int oldstate, const int newstate). Other changes happen in interrupts too. */
SEC("tp_btf/inet_sock_set_state")
int tcp_connecting(u64 *ctx)
{
	if ((s32)ctx[2] == TCP_SYN_SENT)
		note_owner((struct sock *)ctx[0]);
	return 0;
}

SEC("tp_btf/tcp_retransmit_skb")
int tcp_retransmit(u64 *ctx)
{
	struct sock *sock = (struct sock *)ctx[0];
	struct ig_settings *now = settings_now();
	struct ig_count *count;
	struct ig_tcp *record;
	u32 pid = 0, *owner;

	if (!now)
		return 0;
	if (now->filter) {
		owner = bpf_sk_storage_get(&owners, sock, 0, 0);
		if (!owner || !*owner)
			return 0;
		pid = *owner;
	}
	count = count_of(pid, IG_SOURCE_TCP, IG_TCP_RETRANSMIT);
	if (!count)
		return 0;
	ADD(count->entered, 1);
	ADD(count->seen, 1);
	record = bpf_ringbuf_reserve(&retransmits, sizeof(*record), 0);
	if (!record) {
		ADD(count->lost, 1);
		return 0;
	}
	set_header(&record->header, IG_KIND_TCP, sizeof(*record), bpf_ktime_get_ns());
	__builtin_memset(record->local, 0, sizeof(record->local));
	__builtin_memset(record->remote, 0, sizeof(record->remote));
	record->pid = pid;
	record->reserved = 0;
	record->family = sock->__sk_common.skc_family;
	record->state = sock->__sk_common.skc_state;
	record->local_port = sock->__sk_common.skc_num;
	record->remote_port = __builtin_bswap16(sock->__sk_common.skc_dport);
	if (record->family == AF_INET6) {
		bpf_probe_read_kernel(record->local, 16, &sock->__sk_common.skc_v6_rcv_saddr);
		bpf_probe_read_kernel(record->remote, 16, &sock->__sk_common.skc_v6_daddr);
	} else {
		*(u32 *)record->local = sock->__sk_common.skc_rcv_saddr;
		*(u32 *)record->remote = sock->__sk_common.skc_daddr;
	}
	bpf_ringbuf_submit(record, 0);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
