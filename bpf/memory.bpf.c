/* Memory of GPU processes: pages they were given, and time they lost making room themselves. */
#include "ingero/host.h"

struct {
	MAP_UINT(type, BPF_MAP_TYPE_RINGBUF);
	MAP_UINT(max_entries, 256 << 10);
} reclaims SEC(".maps");

/* When a thread began to reclaim, by tid. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_LRU_HASH);
	MAP_UINT(max_entries, 4096);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, u64);
} reclaiming SEC(".maps");

INLINE u64 bytes_of_pages(u64 n_pages)
{
	struct ig_settings *now = settings_now();

	return now ? n_pages << (now->page_log2 & 31) : 0;
}

/* TP_PROTO(struct page *page, unsigned int order, gfp_t gfp_flags, int migratetype). Counted only: too many for records. */
SEC("tp_btf/mm_page_alloc")
int page_alloc(u64 *ctx)
{
	u32 pid = bpf_get_current_pid_tgid() >> 32;
	struct ig_count *count;

	if (!ctx[0] || !is_gpu_process(pid))
		return 0;
	count = count_of(pid, IG_SOURCE_HOST, IG_HOST_PAGE_ALLOC);
	if (count) {
		ADD(count->entered, 1);
		ADD(count->seen, 1);
		ADD(count->sampled, 1);
		ADD(count->bytes, bytes_of_pages(1ull << (ctx[1] & 31)));
	}
	return 0;
}

INLINE int on_reclaim(void)
{
	u64 pid_tgid = bpf_get_current_pid_tgid(), now_ns = bpf_ktime_get_ns();
	u32 tid = (u32)pid_tgid;

	if (is_gpu_process(pid_tgid >> 32))
		bpf_map_update_elem(&reclaiming, &tid, &now_ns, BPF_ANY);
	return 0;
}

/* TP_PROTO(int order, gfp_t gfp_flags). */
SEC("tp_btf/mm_vmscan_direct_reclaim_begin")
int reclaim_begin(u64 *ctx)
{
	(void)ctx;
	return on_reclaim();
}

INLINE int on_reclaimed(u64 n_pages)
{
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u64 *began = bpf_map_lookup_elem(&reclaiming, &tid), now_ns = bpf_ktime_get_ns();
	struct span reclaim = {.source = IG_SOURCE_HOST, .op = IG_HOST_DIRECT_RECLAIM};

	if (!began)
		return 0;
	reclaim.start_ns = *began;
	reclaim.duration_ns = now_ns - *began;
	reclaim.amount = bytes_of_pages(n_pages);
	bpf_map_delete_elem(&reclaiming, &tid);
	COUNT_SPAN(reclaims, &reclaim);
	return 0;
}

/* TP_PROTO(unsigned long nr_reclaimed). */
SEC("tp_btf/mm_vmscan_direct_reclaim_end")
int reclaim_end(u64 *ctx)
{
	return on_reclaimed(ctx[0]);
}

/* The same for a cgroup that reached its own limit. */
SEC("tp_btf/mm_vmscan_memcg_reclaim_begin")
int cgroup_reclaim_begin(u64 *ctx)
{
	(void)ctx;
	return on_reclaim();
}

SEC("tp_btf/mm_vmscan_memcg_reclaim_end")
int cgroup_reclaim_end(u64 *ctx)
{
	return on_reclaimed(ctx[0]);
}

char LICENSE[] SEC("license") = "GPL";
