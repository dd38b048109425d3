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

/* How the cache is read. PAIRS: two vectors at once, the even places and then the odd ones; queries and sums are then
 * kept in that order. */
enum { F32, PLAIN, PAIRS };

/* Two vectors of a row. */
INLINE void load_two(const void *cache, int64_t offset, const int how, vf two[2]) {
    if (how == PAIRS)
        v_load_pairs((const bf16 *)cache + offset, &two[0], &two[1]);
    else {
        two[0] = load_cached(cache, offset, how == PLAIN);
        two[1] = load_cached(cache, offset + LANES, how == PLAIN);
    }
}

/* scores[head][key] of `heads` heads; computes whole steps, whose last keys may repeat. */
INLINE void score(const int heads, const int how, const float *query, int64_t size, const void *keys, const void *values,
                  const int64_t *rows, int64_t num_keys, float scores[MAX_GROUP][KEYS + 16]) {
    const int step = SUMS / heads;
    for (int64_t k = 0; k < num_keys; k += step) {
        vf sums[SUMS];
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++)
            sums[i] = v_set(0);
        for (int i = 0; i < step; i++) {
            prefetch_row(keys, rows[min64(k + i + 16, KEYS + 15)], size, how != F32);
            prefetch_row(values, rows[k + i], size, how != F32);
        }
        int64_t d = 0;
        for (; d + 2 * LANES <= size; d += 2 * LANES) {
#pragma GCC unroll 16
            for (int i = 0; i < step; i++) {
                vf key[2];
                load_two(keys, rows[k + i] + d, how, key);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++)
                    sums[h * step + i] += v_load(query + h * size + d) * key[0];
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++)
                    sums[h * step + i] += v_load(query + h * size + d + LANES) * key[1];
            }
        }
        if (d < size) {
#pragma GCC unroll 16
            for (int i = 0; i < step; i++) {
                vf key = load_cached(keys, rows[k + i] + d, how == PLAIN);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++)
                    sums[h * step + i] += v_load(query + h * size + d) * key;
            }
        }
        float added[SUMS];
        for (int i = 0; i < SUMS; i += LANES)
            v_store(added + i, v_sums(sums + i));
        for (int h = 0; h < heads; h++)
            memcpy(&scores[h][k], added + h * step, 4 * step);
    }
}

/* sums[head][column ..] = the weighted values, of `pairs` times two vectors of columns; 0: of one vector. */
INLINE void weigh(const int heads, const int pairs, const int how, const float weights[MAX_GROUP][KEYS + 16], int64_t column,
                  const void *values, const int64_t *rows, int64_t num_keys, float sums[MAX_GROUP][MAX_HEAD_DIM]) {
    const int nv = pairs ? 2 * pairs : 1;
    vf totals[MAX_GROUP][8];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++)
            totals[h][j] = v_set(0);
    for (int64_t k = 0; k < num_keys; k++) {
        vf value[8];
        if (pairs == 0)
            value[0] = load_cached(values, rows[k] + column, how == PLAIN);
#pragma GCC unroll 4
        for (int j = 0; j < pairs; j++)
            load_two(values, rows[k] + column + 2 * j * LANES, how, value + 2 * j);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            vf weight = v_set(weights[h][k]);
#pragma GCC unroll 8
            for (int j = 0; j < nv; j++)
                totals[h][j] += weight * value[j];
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++)
            v_store(&sums[h][column + j * LANES], totals[h][j]);
}

INLINE void attend(const int heads, const int how, const atom_attention_args *a, const float *query, int64_t num_keys, chunk *c) {
    int64_t size = a->head_dim;
    score(heads, how, query, size, a->keys, a->values, c->rows, num_keys, c->scores);
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
    const int pairs = SUMS / heads >= 8 ? 4 : SUMS / heads / 2;
    int64_t d = 0;
    for (; d + 2 * pairs * LANES <= size; d += 2 * pairs * LANES)
        weigh(heads, pairs, how, c->scores, d, a->values, c->rows, num_keys, c->sums);
    for (; d + 2 * LANES <= size; d += 2 * LANES)
        weigh(heads, 1, how, c->scores, d, a->values, c->rows, num_keys, c->sums);
    if (d < size)
        weigh(heads, 0, how, c->scores, d, a->values, c->rows, num_keys, c->sums);
}

static int cache_mode(const atom_attention_args *a) {
    return !a->cache_is_bf16 ? F32 : a->head_dim % (2 * LANES) == 0 ? PAIRS : PLAIN;
}

#define ATTEND(heads, name)                                                                                                       \
    static void __attribute__((noinline)) name(const atom_attention_args *a, const float *query, int64_t num_keys, chunk *c) {    \
        switch (cache_mode(a)) {                                                                                                  \
        case F32: attend(heads, F32, a, query, num_keys, c); break;                                                               \
        case PLAIN: attend(heads, PLAIN, a, query, num_keys, c); break;                                                           \
        case PAIRS: attend(heads, PAIRS, a, query, num_keys, c); break;                                                           \
        }                                                                                                                         \
    }
ATTEND(4, atom_decode_heads4)
ATTEND(2, atom_decode_heads2)
ATTEND(1, atom_decode_heads1)

void atom_decode_query(const atom_attention_args *a, const float *q, float *query) {
    int64_t width = a->num_heads / a->num_kv_heads * a->head_dim;
    float scale = a->scale * LOG2E;
    if (cache_mode(a) == PAIRS)
        for (int64_t i = 0; i < width; i += 2 * LANES)
            for (int j = 0; j < LANES; j++) {
                query[i + j] = q[i + 2 * j] * scale;
                query[i + LANES + j] = q[i + 2 * j + 1] * scale;
            }
    else
        for (int64_t i = 0; i < width; i += LANES)
            v_store(query + i, v_load(q + i) * scale);
}

merge_factors __attribute__((noinline)) atom_merge_totals(float *largest, float *total, float other_largest, float other_total) {
    float best = other_largest > *largest ? other_largest : *largest;
    merge_factors f = {exp2f(*largest - best), exp2f(other_largest - best)};
    *total = *total * f.keep + other_total * f.take;
    *largest = best;
    return f;
}

void __attribute__((noinline)) atom_merge_sums(float *sums, const float *other, merge_factors f, int64_t size) {
    for (int64_t d = 0; d < size; d += LANES)
        v_store(sums + d, v_load(sums + d) * f.keep + v_load(other + d) * f.take);
}

/* One head: into and from are (largest, total, sums). */
static void merge_head(float *largest, float *total, float *sums, float other_largest, float other_total, const float *other_sums,
                       int64_t size) {
    atom_merge_sums(sums, other_sums, atom_merge_totals(largest, total, other_largest, other_total), size);
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
        while (k < num_keys) { /* page by page */
            int64_t row = cache_row(a, table, kv_head, start + k);
            int64_t stop = min64(num_keys, k + a->block_size - (start + k) % a->block_size);
            for (; k < stop; k++, row += size)
                c->rows[k] = row;
        }
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

float __attribute__((noinline)) atom_finish_factor(const atom_attention_args *a, int64_t head, float largest, float total) {
    float factor = 1.0f;
    if (a->sinks) {
        float sink = a->sinks[head] * LOG2E;
        if (sink > largest) {
            factor = exp2f(largest - sink);
            total = total * factor + 1.0f;
        } else
            total += exp2f(sink - largest);
    }
    return factor / total;
}

void atom_decode_finish(const atom_attention_args *a, const decode_state *state, int64_t kv_head, float *out) {
    int64_t group = a->num_heads / a->num_kv_heads, size = a->head_dim;
    for (int64_t h = 0; h < group; h++) {
        float factor = atom_finish_factor(a, kv_head * group + h, state->largest[h], state->total[h]);
        const float *sums = state->sums + h * size;
        if (a->is_uniform)
            for (int64_t d = 0; d < size; d += LANES)
                v_store(out + h * size + d, v_load(sums + d) * factor + 0.0f); /* as in atom_prefill_rows */
        else if (cache_mode(a) == PAIRS)
            for (int64_t d = 0; d < size; d += 2 * LANES)
                for (int j = 0; j < LANES; j++) {
                    out[h * size + d + 2 * j] = sums[d + j] * factor;
                    out[h * size + d + 2 * j + 1] = sums[d + LANES + j] * factor;
                }
        else
            for (int64_t d = 0; d < size; d += LANES)
                v_store(out + h * size + d, v_load(sums + d) * factor);
    }
}
