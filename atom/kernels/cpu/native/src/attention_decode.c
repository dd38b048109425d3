/* Attention of one query token: as fast as its keys and values come from memory.
 *
 * All query heads of a kv head use a key while it is in registers: 4 heads by 4 keys, 2 by 8 or 1 by 16 sums at once, which are
 * added up across the lanes together. Then the weighted values, in columns of 4 or 8 vectors, from the cache.
 */
#include "attention.h"

#include <math.h>

#define KEYS 256 /* at once: their values wait in L2 */
#define SUMS (NUM_REGISTERS == 32 ? 16 : 8)
#define MAX_GROUP 4

typedef struct {
    int64_t rows[KEYS + 16]; /* offsets of the keys' rows */
    float scores[MAX_GROUP][KEYS + 16];
    float largest[MAX_GROUP], total[MAX_GROUP], sums[MAX_GROUP][MAX_HEAD_DIM];
} chunk;
_Static_assert(sizeof(chunk) <= DECODE_SCRATCH, "a chunk fits where attention.c keeps it");

INLINE void prefetch_row(const void *cache, int64_t row, int64_t size, const int is_bf16) {
    const char *p = (const char *)cache + row * (is_bf16 ? 2 : 4);
    for (int64_t i = 0; i < size * (is_bf16 ? 2 : 4); i += 64)
        __builtin_prefetch(p + i);
}

/* scores[head][key] of `heads` heads; computes whole steps, whose last keys may repeat. */
INLINE void score(const int heads, const int is_bf16, const float *query, int64_t size, const void *keys, const void *values,
                  const int64_t *rows, int64_t num_keys, float scores[MAX_GROUP][KEYS + 16]) {
    const int step = SUMS / heads;
    for (int64_t k = 0; k < num_keys; k += step) {
        vf sums[SUMS];
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++)
            sums[i] = v_set(0);
        for (int i = 0; i < step; i++) {
            prefetch_row(keys, rows[min64(k + i + 16, KEYS + 15)], size, is_bf16);
            prefetch_row(values, rows[k + i], size, is_bf16);
        }
        for (int64_t d = 0; d < size; d += LANES) {
            vf q[MAX_GROUP];
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
                q[h] = v_load(query + h * size + d);
#pragma GCC unroll 16
            for (int i = 0; i < step; i++) {
                vf key = load_cached(keys, rows[k + i] + d, is_bf16);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++)
                    sums[h * step + i] += q[h] * key;
            }
        }
        float added[SUMS];
        for (int i = 0; i < SUMS; i += LANES)
            v_store(added + i, v_sums(sums + i));
        for (int h = 0; h < heads; h++)
            memcpy(&scores[h][k], added + h * step, 4 * step);
    }
}

/* sums[head][column ..] = the weighted values. */
INLINE void weigh(const int heads, const int nv, const int is_bf16, const float weights[MAX_GROUP][KEYS + 16], int64_t column,
                  const void *values, const int64_t *rows, int64_t num_keys, float sums[MAX_GROUP][MAX_HEAD_DIM]) {
    vf totals[MAX_GROUP][8];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++)
            totals[h][j] = v_set(0);
    for (int64_t k = 0; k < num_keys; k++) {
        vf x[MAX_GROUP];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
            x[h] = v_set(weights[h][k]);
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) {
            vf value = load_cached(values, rows[k] + column + j * LANES, is_bf16);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
                totals[h][j] += x[h] * value;
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++)
            v_store(&sums[h][column + j * LANES], totals[h][j]);
}

INLINE void attend(const int heads, const int is_bf16, const atom_attention_args *a, const float *query, int64_t num_keys, chunk *c) {
    int64_t size = a->head_dim;
    score(heads, is_bf16, query, size, a->keys, a->values, c->rows, num_keys, c->scores);
    for (int h = 0; h < heads; h++) {
        float *scores = c->scores[h];
        for (int64_t k = num_keys; k < ceil_div(num_keys, LANES) * LANES; k++)
            scores[k] = -INFINITY;
        vf largest = v_set(UNSEEN), total = {};
        for (int64_t k = 0; k < num_keys; k += LANES) {
            if (a->soft_cap > 0) {
                vf capped = cap_scores(v_load(scores + k), a->soft_cap);
                if (num_keys - k < LANES)
                    v_store_some(scores + k, capped, num_keys - k);
                else
                    v_store(scores + k, capped);
            }
            largest = v_max(largest, v_load(scores + k));
        }
        c->largest[h] = v_largest(largest);
        for (int64_t k = 0; k < num_keys; k += LANES) {
            vf weight = v_exp2(v_load(scores + k) - c->largest[h]);
            v_store(scores + k, weight);
            total += weight;
        }
        c->total[h] = v_sum(total);
    }
    const int nv = SUMS / heads > 8 ? 8 : SUMS / heads;
    int64_t d = 0;
    for (; d + nv * LANES <= size; d += nv * LANES)
        weigh(heads, nv, is_bf16, c->scores, d, a->values, c->rows, num_keys, c->sums);
    for (; d < size; d += LANES)
        weigh(heads, 1, is_bf16, c->scores, d, a->values, c->rows, num_keys, c->sums);
}

#define ATTEND(heads, name)                                                                                                       \
    static void __attribute__((noinline)) name(const atom_attention_args *a, const float *query, int64_t num_keys, chunk *c) {    \
        if (a->cache_is_bf16)                                                                                                     \
            attend(heads, 1, a, query, num_keys, c);                                                                              \
        else                                                                                                                      \
            attend(heads, 0, a, query, num_keys, c);                                                                              \
    }
ATTEND(4, atom_decode_heads4)
ATTEND(2, atom_decode_heads2)
ATTEND(1, atom_decode_heads1)

/* One head: into and from are (largest, total, sums). */
static void merge_head(float *largest, float *total, float *sums, float other_largest, float other_total, const float *other_sums,
                       int64_t size) {
    float best = other_largest > *largest ? other_largest : *largest;
    float keep = exp2f(*largest - best), take = exp2f(other_largest - best);
    *total = *total * keep + other_total * take;
    *largest = best;
    for (int64_t d = 0; d < size; d += LANES)
        v_store(sums + d, v_load(sums + d) * keep + v_load(other_sums + d) * take);
}

void atom_decode_merge(const atom_attention_args *a, decode_state *into, const decode_state *from) {
    int64_t size = a->head_dim;
    for (int64_t h = 0; h < a->num_heads / a->num_kv_heads; h++)
        merge_head(into->largest + h, into->total + h, into->sums + h * size, from->largest[h], from->total[h],
                   from->sums + h * size, size);
}

void atom_decode_span(const atom_attention_args *a, char *scratch, const float *query, const int32_t *table, int64_t kv_head,
                      int64_t low, int64_t high, decode_state *state) {
    chunk *c = (chunk *)scratch;
    int64_t group = a->num_heads / a->num_kv_heads, size = a->head_dim;
    for (int64_t h = 0; h < group; h++) {
        state->largest[h] = UNSEEN;
        state->total[h] = 0;
    }
    memset(state->sums, 0, sizeof(float) * group * size);
    for (int64_t start = low, end; start < high; start = end) {
        end = min64(high, (start / KEYS + 1) * KEYS);
        int64_t num_keys = end - start, k = 0;
        for (; k < num_keys; k++)
            c->rows[k] = cache_row(a, table, kv_head, start + k);
        for (; k < KEYS + 16; k++)
            c->rows[k] = c->rows[num_keys - 1];
        for (int64_t h = 0, heads; h < group; h += heads) {
            heads = group - h >= 4 ? 4 : group - h >= 2 ? 2 : 1;
            (heads == 4 ? atom_decode_heads4 : heads == 2 ? atom_decode_heads2 : atom_decode_heads1)(a, query + h * size, num_keys, c);
            for (int64_t i = 0; i < heads; i++)
                merge_head(state->largest + h + i, state->total + h + i, state->sums + (h + i) * size, c->largest[i], c->total[i],
                           c->sums[i], size);
        }
    }
}

void atom_decode_finish(const atom_attention_args *a, const decode_state *state, int64_t kv_head, float *out) {
    int64_t group = a->num_heads / a->num_kv_heads, size = a->head_dim;
    for (int64_t h = 0; h < group; h++) {
        float total = state->total[h], factor = 1.0f;
        if (a->sinks) {
            float sink = a->sinks[kv_head * group + h] * LOG2E;
            if (sink > state->largest[h]) {
                factor = exp2f(state->largest[h] - sink);
                total = total * factor + 1.0f;
            } else
                total += exp2f(sink - state->largest[h]);
        }
        factor /= total;
        for (int64_t d = 0; d < size; d += LANES)
            v_store(out + h * size + d, v_load(state->sums + h * size + d) * factor);
    }
}
