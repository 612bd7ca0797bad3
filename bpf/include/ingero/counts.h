/* Exact counts and latency histograms, and the choice of which calls become records. */
#ifndef INGERO_COUNTS_H
#define INGERO_COUNTS_H

#include "ingero/maps/shared.h"

static const struct ig_count ZERO_COUNT;

INLINE u32 floor_log2(u64 value)
{
	u32 log2 = 0;

	if (value >> 32) {
		value >>= 32;
		log2 = 32;
	}
	if (value >> 16) {
		value >>= 16;
		log2 += 16;
	}
	if (value >> 8) {
		value >>= 8;
		log2 += 8;
	}
	if (value >> 4) {
		value >>= 4;
		log2 += 4;
	}
	if (value >> 2) {
		value >>= 2;
		log2 += 2;
	}
	return log2 + (value >> 1 ? 1 : 0);
}

/* Bucket of a duration: four per octave, so that a quantile is right to within an eighth. */
INLINE u32 bucket_of(u64 duration_ns)
{
	u32 log2, bucket;

	if (duration_ns < 1ull << IG_HIST_FIRST_LOG2)
		return 0;
	log2 = floor_log2(duration_ns);
	bucket = 1 + (log2 - IG_HIST_FIRST_LOG2) * 4 + ((duration_ns >> (log2 - 2)) & 3);
	return bucket < IG_HIST_BUCKETS ? bucket : IG_HIST_BUCKETS - 1;
}

/* The counts of one operation of one process; NULL when the map is full, which is counted. */
INLINE struct ig_count *count_of(u32 pid, u8 source, u16 op)
{
	struct ig_count_key key = {.pid = pid, .op = op, .source = source};
	struct ig_count *count = bpf_map_lookup_elem(&counts, &key);
	struct ig_losses *lost;

	if (LIKELY(count))
		return count;
	bpf_map_update_elem(&counts, &key, &ZERO_COUNT, BPF_NOEXIST);
	count = bpf_map_lookup_elem(&counts, &key);
	if (!count && (lost = losses_here()))
		ADD(lost->uncounted, 1);
	return count;
}

struct ig_choice {
	u32 weight; /* 0: leave it out */
	u8 flags;
	u8 reserved[3];
};

/* Begin a new window where the last is over. Two CPUs may begin the same one: a few more are kept then. */
INLINE void turn_window(struct ig_count *count, u64 now_ns)
{
	u32 window = now_ns >> IG_WINDOW_LOG2;

	if (count->window == window)
		return;
	count->window = window;
	count->n_kept = 0;
	count->n_stacks = 0;
}

enum { IG_MAX_TRIES = 16 }; /* of an extreme: who fails has met a greater one, so that few fail twice */

INLINE void raise(u64 *highest, u64 value)
{
	for (u32 i = 0; i < IG_MAX_TRIES; i++) {
		u64 before = *(volatile u64 *)highest;

		if (value <= before || __sync_val_compare_and_swap(highest, before, value) == before)
			return;
	}
}

INLINE void lower(u64 *lowest, u64 value)
{
	for (u32 i = 0; i < IG_MAX_TRIES; i++) {
		u64 before = *(volatile u64 *)lowest;

		if ((before && value >= before) || __sync_val_compare_and_swap(lowest, before, value) == before)
			return;
	}
}

/* How many calls this one stands for, itself included; 0: it is left out. */
INLINE u32 draw(struct ig_count *count, u32 keep_one_in)
{
	if (keep_one_in <= 1 && !*(volatile u64 *)&count->pending)
		return 1;
	if (__sync_fetch_and_add(&count->pending, 1) + 1 < keep_one_in)
		return 0;
	return __sync_lock_test_and_set(&count->pending, 0); /* 0: another CPU took this one along */
}

/* One finished thing. */
struct finished {
	u64 end_ns;
	u64 duration_ns;
	u64 bytes;
	u8 flags;
	u8 reserved[7];
};

/* Count one finished call and decide whether it becomes a record.
 *
 * Records are those of kinds that are never sampled, the first ones of the others, the failed, the slow, the large, and one
 * in keep_one_in of the rest. The last carry in their weight those left out since the one before. More than IG_FLOOD
 * in a window, beside the rest, are lost. When no record can be written, call choice_lost().
 */
INLINE struct ig_choice choose(struct ig_count *count, const struct ig_settings *now, const struct finished *what)
{
	const u8 kept = IG_FLAG_EXACT | IG_FLAG_ERROR | IG_FLAG_FIRST | IG_FLAG_SLOW | IG_FLAG_LARGE;
	u64 duration_ns = what->duration_ns, bytes = what->bytes;
	u8 flags = what->flags;
	struct ig_choice choice = {.weight = 1, .flags = flags};
	u32 bucket = bucket_of(duration_ns);
	u64 before = __sync_fetch_and_add(&count->seen, 1);

	if (bytes)
		ADD(count->bytes, bytes);
	if (flags & IG_FLAG_NESTED)
		ADD(count->nested, 1);
	if (!(flags & IG_FLAG_NO_TIME)) {
		if (bucket < IG_HIST_BUCKETS)
			ADD(count->hist[bucket], 1);
		if (before >= 32 && duration_ns > 8 * (count->total_ns / before))
			choice.flags |= IG_FLAG_SLOW;
		ADD(count->total_ns, duration_ns);
		lower(&count->min_ns, duration_ns);
		raise(&count->max_ns, duration_ns);
	}
	if (flags & IG_FLAG_ERROR)
		ADD(count->errors, 1);
	else if (before < now->keep_first && !(flags & IG_FLAG_EXACT))
		choice.flags |= IG_FLAG_FIRST;
	if (choice.flags & kept) {
		turn_window(count, what->end_ns);
		if (count->n_kept >= IG_FLOOD) {
			ADD(count->lost, 1);
			choice.weight = 0;
			return choice;
		}
		ADD(count->n_kept, 1);
		return choice;
	}
	choice.weight = draw(count, now->keep_one_in);
	if (!choice.weight)
		ADD(count->sampled, 1);
	return choice;
}

INLINE void choice_lost(struct ig_count *count, struct ig_choice choice)
{
	ADD(count->lost, 1);
	if (choice.weight > 1)
		ADD(count->pending, choice.weight - 1);
}

#endif
