/* Between attention.c, which hands out the work, and the two ways to do it. Scores are in units of log2: q is scaled by
 * log2(e) as well, so that weights are 2^(score - largest). */
#ifndef ATOM_ATTENTION_H
#define ATOM_ATTENTION_H

#include "simd.h"

#define MAX_HEAD_DIM 512
#define UNSEEN -1e30f /* the largest score so far of a row that has seen nothing: finite, so that differences are not NaN */

/* Where position `position` of a sequence lies in the cache: an offset in elements to its row of head_dim. */
INLINE int64_t cache_row(const atom_attention_args *a, const int32_t *table, int64_t kv_head, int64_t position) {
    int64_t block = table[position / a->block_size];
    return ((block * a->num_kv_heads + kv_head) * a->block_size + position % a->block_size) * a->head_dim;
}

/* Of the cache: LANES elements from offset. */
INLINE vf load_cached(const void *cache, int64_t offset, int is_bf16) {
    return is_bf16 ? v_load_bf16((const bf16 *)cache + offset) : v_load((const float *)cache + offset);
}

INLINE vf cap_scores(vf scores, float soft_cap) {
    return v_tanh(scores * (1.0f / (soft_cap * LOG2E))) * (soft_cap * LOG2E);
}

/* What a kv head's query heads have gathered of one query token so far. */
typedef struct {
    float *largest, *total; /* [group] */
    float *sums;            /* [group, head_dim] */
} decode_state;

/* Rows row0 .. row0 + num_rows of the (token, query head) rows of a kv head of a sequence, num_rows <= PREFILL_ROWS. */
#define PREFILL_ROWS 128
void atom_prefill_rows(const atom_attention_args *a, char *scratch, int64_t seq, int64_t kv_head, int64_t row0, int64_t num_rows);

/* query [group, head_dim]: q scaled, in the order in which keys are read. */
void atom_decode_query(const atom_attention_args *a, const float *q, float *query);
/* Attention of one token, at that query, to positions [low, high); scratch: DECODE_SCRATCH bytes. */
#define DECODE_SCRATCH (64 << 10)
void atom_decode_span(const atom_attention_args *a, char *scratch, const float *query, const int32_t *table, int64_t kv_head,
                      int64_t low, int64_t high, decode_state *state);
void atom_decode_merge(const atom_attention_args *a, decode_state *into, const decode_state *from);
/* The same of one row, in two steps: *largest and *total take in the other's, then sums *= keep, += other * take. The only code
 * that does so: what is contracted to one rounding is then the same for all. */
typedef struct {
    float keep, take;
} merge_factors;
merge_factors atom_merge_totals(float *largest, float *total, float other_largest, float other_total);
void atom_merge_sums(float *sums, const float *other, merge_factors factors, int64_t size);
/* What a query head's sums are multiplied with in the end. */
float atom_finish_factor(const atom_attention_args *a, int64_t head, float largest, float total);
void atom_decode_finish(const atom_attention_args *a, const decode_state *state, int64_t kv_head, float *out);

/* Where is_uniform, a row's keys are taken in spans of so many at absolute positions, each from an empty state, and merged in
 * order, whether its token comes alone or with others. */
#define UNIFORM_SPAN 512
/* As atom_decode_span for sequence seq's only token, within a span, in the arithmetic of atom_prefill_rows; q as it came,
 * group <= UNIFORM_HEADS, scratch: UNIFORM_SCRATCH bytes. */
#define UNIFORM_HEADS 16
#define UNIFORM_SCRATCH (2 << 20)
void atom_uniform_span(const atom_attention_args *a, char *scratch, int64_t seq, int64_t kv_head, int64_t low, int64_t high,
                       decode_state *state);

#endif
