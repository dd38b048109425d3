/* Attention of many query rows: tiles of 128 rows (token, head) by 128 keys, as two products with an online softmax.
 *
 * Scores are computed transposed, S^T = K Q^T: the key is a row whose elements are broadcast, so keys are widened but never
 * transposed, only the query tile is, once. Rows run along the lanes; maxima and sums of the softmax are then vertical. The
 * tiles of keys stand at absolute positions and a masked key adds exact zeros, so a row's bits do not depend on how
 * the prompt was cut. fp32 all through: an Intel core without AMX runs bf16 dots at half the rate.
 */
#include "attention.h"

#define KEYS 128        /* of a tile: its values' 64 columns are 32 KB */
#define PANEL 64        /* rows, or columns of head_dim, that lie together */
#define DEPTH 128       /* of head_dim at once: 64 x 128 query elements stay in L1 */
#define ROWS_AT_ONCE 6
#define WIDE (NUM_REGISTERS == 32 ? 4 : 2) /* 6 x 4 accumulators of 32 registers, or 6 x 2 of 16 */

/* c [rows, PANEL] += a b, for nv vectors of columns of b [depth, PANEL]. */
INLINE void multiply(const int rows, const int nv, const float *a, int64_t row_step, int64_t depth_step, const float *b,
                     int64_t depth, float *c) {
    vf sums[ROWS_AT_ONCE][WIDE];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            sums[i][j] = v_load(c + i * PANEL + j * LANES);
    for (int64_t k = 0; k < depth; k++, b += PANEL, a += depth_step) {
        vf column[WIDE];
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            column[j] = v_load(b + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            vf x = v_set(a[i * row_step]);
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++)
                sums[i][j] += x * column[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            v_store(c + i * PANEL + j * LANES, sums[i][j]);
}

/* c [m, PANEL] += a b over `columns` (a multiple of 16) columns. */
INLINE void multiply_rows(const int rows, const float *a, int64_t row_step, int64_t depth_step, const float *b, int64_t depth,
                          float *c, int64_t columns) {
    int64_t j = 0;
    for (; j + WIDE * LANES <= columns; j += WIDE * LANES)
        multiply(rows, WIDE, a, row_step, depth_step, b + j, depth, c + j);
    for (; j < columns; j += LANES)
        multiply(rows, 1, a, row_step, depth_step, b + j, depth, c + j);
}

INLINE void multiply_panel(const float *a, int64_t m, int64_t row_step, int64_t depth_step, const float *b, int64_t depth,
                           float *c, int64_t columns) {
    for (; m >= ROWS_AT_ONCE; m -= ROWS_AT_ONCE, a += ROWS_AT_ONCE * row_step, c += ROWS_AT_ONCE * PANEL)
        multiply_rows(ROWS_AT_ONCE, a, row_step, depth_step, b, depth, c, columns);
    switch (m) {
    case 5: multiply_rows(5, a, row_step, depth_step, b, depth, c, columns); break;
    case 4: multiply_rows(4, a, row_step, depth_step, b, depth, c, columns); break;
    case 3: multiply_rows(3, a, row_step, depth_step, b, depth, c, columns); break;
    case 2: multiply_rows(2, a, row_step, depth_step, b, depth, c, columns); break;
    case 1: multiply_rows(1, a, row_step, depth_step, b, depth, c, columns); break;
    }
}

/* scores [keys, PANEL] += keys [keys, head_dim] times a panel of queries [head_dim, PANEL]. */
static void __attribute__((noinline)) atom_prefill_scores(const float *keys, int64_t num_keys, int64_t head_dim,
                                                          const float *queries, int64_t columns, float *scores) {
    for (int64_t d = 0; d < head_dim; d += DEPTH)
        multiply_panel(keys + d, num_keys, head_dim, 1, queries + d * PANEL, min64(DEPTH, head_dim - d), scores, columns);
}

/* sums [rows, PANEL] += weights [keys, PANEL]^T times a panel of values [keys, PANEL]. */
static void __attribute__((noinline)) atom_prefill_values(const float *weights, int64_t num_rows, int64_t num_keys,
                                                          const float *values, int64_t columns, float *sums) {
    multiply_panel(weights, num_rows, 1, PANEL, values, num_keys, sums, columns);
}

typedef struct {
    float queries[PREFILL_ROWS / PANEL][MAX_HEAD_DIM][PANEL];
    float sums[PREFILL_ROWS / PANEL][MAX_HEAD_DIM / PANEL][PANEL][PANEL]; /* panel of rows, of columns, row, column */
    float keys[KEYS * MAX_HEAD_DIM];
    float values[MAX_HEAD_DIM / PANEL][KEYS][PANEL];
    float scores[KEYS][PANEL];
    float largest[PREFILL_ROWS], total[PREFILL_ROWS];
    int32_t positions[PREFILL_ROWS]; /* of each row's token */
} tile;
_Static_assert(sizeof(tile) <= ATOM_SCRATCH, "a tile fits a thread's scratch");

static void load_queries(const atom_attention_args *a, tile *t, const float *q, int64_t kv_head, int64_t row0, int64_t num_rows) {
    int64_t group = a->num_heads / a->num_kv_heads, size = a->head_dim;
    float scale = a->scale * LOG2E;
    for (int64_t row = 0; row < ceil_div(num_rows, 16) * 16; row += LANES) {
        const float *rows[LANES];
        float *to = &t->queries[row / PANEL][0][row % PANEL];
        for (int64_t i = 0; i < LANES; i++) { /* behind the last row it is repeated */
            int64_t r = row0 + min64(row + i, num_rows - 1);
            rows[i] = q + r / group * a->ldq + (kv_head * group + r % group) * size;
        }
        for (int64_t d = 0; d < size; d += 16) /* one line of each row at a time */
            for (int64_t e = d; e < d + 16; e++) {
                vf x;
                for (int i = 0; i < LANES; i++)
                    x[i] = rows[i][e];
                v_store(to + e * PANEL, x * scale);
            }
    }
}

INLINE void load_keys(const atom_attention_args *a, tile *t, const int32_t *table, int64_t kv_head, int64_t low, int64_t high,
                      const int is_bf16) {
    int64_t size = a->head_dim;
    for (int64_t position = low; position < high; position++) {
        int64_t row = cache_row(a, table, kv_head, position);
        float *key = t->keys + (position - low) * size;
        for (int64_t d = 0; d < size; d += LANES) {
            v_store(key + d, load_cached(a->keys, row + d, is_bf16));
            v_store(&t->values[d / PANEL][position - low][d % PANEL], load_cached(a->values, row + d, is_bf16));
        }
    }
}

/* Scores [num_keys] of LANES rows become weights; their largest score and total are brought up to date. Returns what the
 * sums so far are to be multiplied with. */
INLINE vf soften(float *scores, int64_t num_keys, float *largest, float *total) {
    vf before = v_load(largest), best = before, best1 = before, sum = {}, sum1 = {};
    int64_t k = 0;
    for (; k + 2 <= num_keys; k += 2) {
        best = v_max(best, v_load(scores + k * PANEL));
        best1 = v_max(best1, v_load(scores + (k + 1) * PANEL));
    }
    if (k < num_keys)
        best = v_max(best, v_load(scores + k * PANEL));
    best = v_max(best, best1);
    for (k = 0; k + 2 <= num_keys; k += 2) {
        vf weight = v_exp2(v_load(scores + k * PANEL) - best), weight1 = v_exp2(v_load(scores + (k + 1) * PANEL) - best);
        v_store(scores + k * PANEL, weight);
        v_store(scores + (k + 1) * PANEL, weight1);
        sum += weight;
        sum1 += weight1;
    }
    if (k < num_keys) {
        vf weight = v_exp2(v_load(scores + k * PANEL) - best);
        v_store(scores + k * PANEL, weight);
        sum += weight;
    }
    vf shrink = v_exp2(before - best);
    v_store(largest, best);
    v_store(total, v_load(total) * shrink + (sum + sum1));
    return shrink;
}

/* Masks and caps a panel's scores of keys low .. low + num_keys. */
static void finish_scores(const atom_attention_args *a, tile *t, int64_t first_row, int64_t columns, int64_t low, int64_t num_keys) {
    const int32_t *positions = t->positions + first_row;
    if (a->soft_cap > 0)
        for (int64_t k = 0; k < num_keys; k++)
            for (int64_t j = 0; j < columns; j += LANES)
                v_store(&t->scores[k][j], cap_scores(v_load(&t->scores[k][j]), a->soft_cap));
    int all_seen = low + num_keys - 1 <= positions[0] && (a->window == 0 || low > positions[columns - 1] - a->window);
    if (all_seen)
        return;
    int32_t window = a->window ? a->window : INT32_MAX;
    const vf hidden = v_set(-__builtin_inff());
    for (int64_t j = 0; j < columns; j += LANES) {
        vi position;
        memcpy(&position, positions + j, sizeof position);
        for (int64_t k = 0; k < num_keys; k++) {
            vi distance = position - (int32_t)(low + k);
            v_store(&t->scores[k][j], v_select((distance >= 0) & (distance < window), v_load(&t->scores[k][j]), hidden));
        }
    }
}

static void soften_panel(tile *t, int64_t first_row, int64_t columns, int64_t num_keys, int64_t size) {
    float shrink[PANEL];
    int is_shrunk = 0;
    for (int64_t j = 0; j < columns; j += LANES) {
        vf factor = soften(&t->scores[0][j], num_keys, t->largest + first_row + j, t->total + first_row + j);
        v_store(shrink + j, factor);
        for (int i = 0; i < LANES; i++)
            is_shrunk |= factor[i] != 1.0f;
    }
    if (!is_shrunk)
        return;
    for (int64_t row = 0; row < columns; row++)
        if (shrink[row] != 1.0f)
            for (int64_t d = 0; d < size; d += LANES) {
                float *sums = &t->sums[first_row / PANEL][d / PANEL][row][d % PANEL];
                v_store(sums, v_load(sums) * shrink[row]);
            }
}

void atom_prefill_rows(const atom_attention_args *a, char *scratch, int64_t seq, int64_t kv_head, int64_t row0, int64_t num_rows) {
    tile *t = (tile *)scratch;
    int64_t group = a->num_heads / a->num_kv_heads, size = a->head_dim, padded = ceil_div(num_rows, 16) * 16;
    int64_t first_token = a->cu_seqlens_q[seq], first_position = a->context_lens[seq] - (a->cu_seqlens_q[seq + 1] - first_token);
    const int32_t *table = a->block_tables + seq * a->table_stride;
    load_queries(a, t, a->q + first_token * a->ldq, kv_head, row0, num_rows);
    for (int64_t row = 0; row < padded; row++) {
        int64_t r = row0 + min64(row, num_rows - 1);
        t->positions[row] = (int32_t)(first_position + r / group);
        t->largest[row] = a->sinks ? a->sinks[kv_head * group + r % group] * LOG2E : UNSEEN;
        t->total[row] = a->sinks != NULL;
    }
    for (int64_t panel = 0; panel * PANEL < padded; panel++)
        memset(t->sums[panel], 0, ceil_div(size, PANEL) * sizeof t->sums[panel][0]);

    int64_t end = t->positions[padded - 1] + 1, start = a->window ? max64(0, t->positions[0] - a->window + 1) : 0;
    for (int64_t low = start, high; low < end; low = high) {
        high = min64(end, (low / KEYS + 1) * KEYS);
        if (a->cache_is_bf16)
            load_keys(a, t, table, kv_head, low, high, 1);
        else
            load_keys(a, t, table, kv_head, low, high, 0);
        for (int64_t row = 0; row < padded; row += PANEL) {
            int64_t columns = min64(PANEL, padded - row);
            int64_t num_keys = min64(high, t->positions[row + columns - 1] + 1) - low;
            if (num_keys <= 0 || (a->window && high <= t->positions[row] - a->window + 1))
                continue;
            memset(t->scores, 0, num_keys * sizeof t->scores[0]);
            atom_prefill_scores(t->keys, num_keys, size, t->queries[row / PANEL][0], columns, t->scores[0]);
            finish_scores(a, t, row, columns, low, num_keys);
            soften_panel(t, row, columns, num_keys, size);
            for (int64_t d = 0; d < size; d += PANEL)
                atom_prefill_values(t->scores[0], min64(columns, num_rows - row), num_keys, t->values[d / PANEL][0],
                                    min64(PANEL, size - d), t->sums[row / PANEL][d / PANEL][0]);
        }
    }
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t r = row0 + row;
        float *out = a->out + (first_token + r / group) * a->ldo + (kv_head * group + r % group) * size;
        float factor = 1.0f / t->total[row];
        for (int64_t d = 0; d < size; d += LANES)
            v_store(out + d, v_load(&t->sums[row / PANEL][d / PANEL][row % PANEL][d % PANEL]) * factor);
    }
}
