/* Bytes that GPU processes send and receive on sockets: data loaders, checkpoints, collectives over TCP. */
#include "ingero/host.h"

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 512 << 10);
} sockets SEC(".maps");

/* include/linux/socket.h: bytes that stay in the socket, and those of what was sent, back with a notice. */
enum { LEFT_THERE = 0x2 /* MSG_PEEK */ | 0x2000 /* MSG_ERRQUEUE */ };

/* A call that moved nothing because it would have waited is not one that failed (EAGAIN). */
enum { MINUS_EAGAIN = -11 };

INLINE void count_bytes(struct sock *sock, s32 result, u16 op)
{
	struct span moved = {
		.start_ns = bpf_ktime_get_ns(),
		.source = IG_SOURCE_NET,
		.op = op,
		.flags = IG_FLAG_NO_TIME,
	};

	if (result == MINUS_EAGAIN || !is_gpu_process(bpf_get_current_pid_tgid() >> 32))
		return;
	if (result > 0)
		moved.amount = result;
	if (result < 0) {
		moved.rc = result;
		moved.flags |= IG_FLAG_ERROR;
	}
	moved.family = sock->__sk_common.skc_family;
	COUNT_SPAN(sockets, &moved);
}

/* TP_PROTO(struct sock *sk, int ret, int flags), Linux 6.3 ("net-memcg ... add tracepoints to sock_send/recv_length"). */
SEC("tp_btf/sock_send_length")
int sock_sent(u64 *ctx)
{
	count_bytes((struct sock *)ctx[0], (s32)ctx[1], IG_NET_SEND);
	return 0;
}

SEC("tp_btf/sock_recv_length")
int sock_received(u64 *ctx)
{
	if (!((u32)ctx[2] & LEFT_THERE))
		count_bytes((struct sock *)ctx[0], (s32)ctx[1], IG_NET_RECV);
	return 0;
}

/* int sock_sendmsg(struct socket *sock, struct msghdr *msg), before Linux 6.3. Messages after the first of one sendmmsg() to
 * the same address do not pass here.
 */
SEC("fexit/sock_sendmsg")
int sock_sent_fexit(u64 *ctx)
{
	count_bytes(((struct socket *)ctx[0])->sk, (s32)ctx[2], IG_NET_SEND);
	return 0;
}

/* int sock_recvmsg(struct socket *sock, struct msghdr *msg, int flags). */
SEC("fexit/sock_recvmsg")
int sock_received_fexit(u64 *ctx)
{
	if (!((u32)ctx[2] & LEFT_THERE))
		count_bytes(((struct socket *)ctx[0])->sk, (s32)ctx[3], IG_NET_RECV);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
