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

/* This CPU's counts of one operation of one process; NULL when the map is full, which is counted. */
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
		lost->uncounted++;
	return count;
}

struct ig_choice {
	u32 weight; /* 0: leave it out */
	u8 flags;
	u8 reserved[3];
};

/* Begin a new window where the last is over. */
INLINE void turn_window(struct ig_count *count, u64 now_ns)
{
	u32 window = now_ns >> IG_WINDOW_LOG2;

	if (count->window == window)
		return;
	count->window = window;
	count->n_kept = 0;
	count->n_stacks = 0;
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
	u64 before = count->seen++;

	count->bytes += bytes;
	if (flags & IG_FLAG_NESTED)
		count->nested++;
	if (!(flags & IG_FLAG_NO_TIME)) {
		if (bucket < IG_HIST_BUCKETS)
			count->hist[bucket]++;
		if (before >= 32 && duration_ns > 8 * (count->total_ns / before))
			choice.flags |= IG_FLAG_SLOW;
		count->total_ns += duration_ns;
		if (!count->min_ns || duration_ns < count->min_ns)
			count->min_ns = duration_ns;
		if (duration_ns > count->max_ns)
			count->max_ns = duration_ns;
	}
	if (flags & IG_FLAG_ERROR)
		count->errors++;
	else if (before < now->keep_first && !(flags & IG_FLAG_EXACT))
		choice.flags |= IG_FLAG_FIRST;
	if (choice.flags & kept) {
		turn_window(count, what->end_ns);
		if (count->n_kept >= IG_FLOOD) {
			count->lost++;
			choice.weight = 0;
			return choice;
		}
		count->n_kept++;
	} else {
		if (++count->pending < now->keep_one_in) {
			count->sampled++;
			choice.weight = 0;
			return choice;
		}
		choice.weight = count->pending;
		count->pending = 0;
	}
	count->emitted++;
	return choice;
}

INLINE void choice_lost(struct ig_count *count, struct ig_choice choice)
{
	count->emitted--;
	count->lost++;
	count->pending += choice.weight - 1;
}

#endif
