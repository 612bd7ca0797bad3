/* TCP segments sent again, IPv4 and IPv6. */
#include "ingero/host.h"

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 256 << 10);
} retransmits SEC(".maps");

enum { AF_INET = 2, AF_INET6 = 10, OP_TCP_RETRANSMIT = 1 };

SEC("tp_btf/tcp_retransmit_skb")
int tcp_retransmit(u64 *ctx)
{
	struct sock *sock = (struct sock *)ctx[0];
	struct ig_count *count = count_of(0, IG_SOURCE_TCP, OP_TCP_RETRANSMIT);
	struct ig_tcp *record;

	if (!count)
		return 0;
	count->entered++;
	count->seen++;
	record = bpf_ringbuf_reserve(&retransmits, sizeof(*record), 0);
	if (!record) {
		count->lost++;
		return 0;
	}
	count->emitted++;
	set_header(&record->header, IG_KIND_TCP, sizeof(*record), bpf_ktime_get_ns());
	__builtin_memset(record->local, 0, sizeof(record->local));
	__builtin_memset(record->remote, 0, sizeof(record->remote));
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
