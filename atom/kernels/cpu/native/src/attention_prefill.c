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
#define FEW_ROWS 4 /* up to here keys and columns lie along the lanes, and not rows */
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
    /* Where is_uniform: what the spans before this one gave; sums as above. */
    float whole_sums[PREFILL_ROWS / PANEL][MAX_HEAD_DIM / PANEL][PANEL][PANEL], whole_largest[PREFILL_ROWS], whole_total[PREFILL_ROWS];
    int32_t positions[PREFILL_ROWS]; /* of each row's token */
} tile;
_Static_assert(sizeof(tile) <= UNIFORM_SCRATCH && UNIFORM_SCRATCH <= ATOM_SCRATCH / 2, "a tile fits a thread's scratch");

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
 * sums so far are to be multiplied with. Weights at even and at odd positions are added up apart: is_odd, the first one's. */
INLINE vf soften(float *scores, int64_t num_keys, int is_odd, float *largest, float *total) {
    vf before = v_load(largest), best = before, best1 = before, sum = {}, sum1 = {};
    int64_t k = 0;
    for (; k + 2 <= num_keys; k += 2) {
        best = v_max(best, v_load(scores + k * PANEL));
        best1 = v_max(best1, v_load(scores + (k + 1) * PANEL));
    }
    if (k < num_keys)
        best = v_max(best, v_load(scores + k * PANEL));
    best = v_max(best, best1);
    k = 0;
    if (is_odd) {
        sum1 = v_exp2(v_load(scores) - best);
        v_store(scores, sum1);
        k = 1;
    }
    for (; k + 2 <= num_keys; k += 2) {
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

static void soften_panel(tile *t, int64_t first_row, int64_t columns, int64_t low, int64_t num_keys, int64_t size) {
    float shrink[PANEL];
    int is_shrunk = 0;
    for (int64_t j = 0; j < columns; j += LANES) {
        vf factor = soften(&t->scores[0][j], num_keys, low & 1, t->largest + first_row + j, t->total + first_row + j);
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

/* Loads the queries of rows row0 .. row0 + num_rows and says where they stand. */
static void begin_rows(const atom_attention_args *a, tile *t, int64_t seq, int64_t kv_head, int64_t row0, int64_t num_rows) {
    int64_t group = a->num_heads / a->num_kv_heads, first_token = a->cu_seqlens_q[seq];
    int64_t first_position = a->context_lens[seq] - (a->cu_seqlens_q[seq + 1] - first_token);
    load_queries(a, t, a->q + first_token * a->ldq, kv_head, row0, num_rows);
    for (int64_t row = 0; row < ceil_div(num_rows, 16) * 16; row++)
        t->positions[row] = (int32_t)(first_position + (row0 + min64(row, num_rows - 1)) / group);
}

/* Rows that have seen nothing. */
static void clear_rows(const atom_attention_args *a, tile *t, int64_t padded) {
    for (int64_t row = 0; row < padded; row++) {
        t->largest[row] = UNSEEN;
        t->total[row] = 0;
    }
    for (int64_t panel = 0; panel * PANEL < padded; panel++)
        for (int64_t d = 0; d < a->head_dim; d += PANEL)
            memset(t->sums[panel][d / PANEL], 0, min64(PANEL, padded - panel * PANEL) * sizeof t->sums[0][0][0]);
}

#if defined(V512)
/* ---- a few rows, as a token alone has them: the same sums in the same order, straight from the cache ----
 *
 * Keys lie along the lanes for the scores, and columns for the values, so that no lane is idle for want of rows.
 */

/* out[i] = element i of LANES keys at these offsets. */
INLINE void transpose_keys(const void *cache, const int64_t *offsets, int64_t d, const int is_bf16, vf out[LANES]) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i++)
        a[i] = (__m512)load_cached(cache, offsets[i] + d, is_bf16);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) /* a[i + j]: in each quarter q, element 4 q + j of keys i .. i + 3 */
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_shuffle_ps(b[i + j], b[i + 2 + j], 0x44);
            a[i + 2 * j + 1] = _mm512_shuffle_ps(b[i + j], b[i + 2 + j], 0xee);
        }
    for (int j = 0; j < 4; j++) {
        __m512 low = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88), low1 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88);
        __m512 high = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd), high1 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xdd);
        out[j] = (vf)_mm512_shuffle_f32x4(low, low1, 0x88);
        out[4 + j] = (vf)_mm512_shuffle_f32x4(high, high1, 0x88);
        out[8 + j] = (vf)_mm512_shuffle_f32x4(low, low1, 0xdd);
        out[12 + j] = (vf)_mm512_shuffle_f32x4(high, high1, 0xdd);
    }
}

/* scores [keys, PANEL], its first LANES columns; offsets: of the keys and 2 LANES repetitions of the last. */
INLINE void few_scores(const int rows, const int is_bf16, const void *cache, const int64_t *offsets, int64_t num_keys, int64_t size,
                       const float *queries, float *scores) {
    for (int64_t k = 0; k < num_keys; k += 2 * LANES) {
        vf sums[2][FEW_ROWS] = {};
        for (int64_t d = 0; d < size; d += LANES) {
            vf keys[2][LANES];
            transpose_keys(cache, offsets + k, d, is_bf16, keys[0]);
            transpose_keys(cache, offsets + k + LANES, d, is_bf16, keys[1]);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
#pragma GCC unroll 4
                for (int row = 0; row < rows; row++) {
                    vf query = v_set(queries[(d + i) * PANEL + row]);
                    sums[0][row] += keys[0][i] * query;
                    sums[1][row] += keys[1][i] * query;
                }
        }
        for (int64_t i = 0; i < min64(2 * LANES, num_keys - k); i++) {
            v_store(scores + (k + i) * PANEL, v_set(0));
            for (int row = 0; row < rows; row++)
                scores[(k + i) * PANEL + row] = sums[i / LANES][row][i % LANES];
        }
    }
}

/* sums [rows, PANEL] += weights [keys, PANEL]^T times nv vectors of columns of the values at these offsets. */
INLINE void few_values(const int rows, const int nv, const int is_bf16, const float *weights, int64_t num_keys, const void *cache,
                       const int64_t *offsets, int64_t column, float *sums) {
    vf totals[FEW_ROWS][4];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            totals[row][j] = v_load(sums + row * PANEL + j * LANES);
    for (int64_t k = 0; k < num_keys; k++) {
        vf value[4];
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            value[j] = load_cached(cache, offsets[k] + column + j * LANES, is_bf16);
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            vf weight = v_set(weights[k * PANEL + row]);
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++)
                totals[row][j] += weight * value[j];
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            v_store(sums + row * PANEL + j * LANES, totals[row][j]);
}

INLINE void attend_few(const int rows, const int is_bf16, const atom_attention_args *a, tile *t, const int32_t *table,
                       int64_t kv_head, int64_t low, int64_t num_keys) {
    int64_t size = a->head_dim, offsets[KEYS + 2 * LANES], d;
    for (int64_t k = 0; k < num_keys + 2 * LANES; k++)
        offsets[k] = k < num_keys ? cache_row(a, table, kv_head, low + k) : offsets[k - 1];
    few_scores(rows, is_bf16, a->keys, offsets, num_keys, size, t->queries[0][0], t->scores[0]);
    finish_scores(a, t, 0, LANES, low, num_keys);
    soften_panel(t, 0, LANES, low, num_keys, size);
    for (d = 0; d + 4 * LANES <= size; d += 4 * LANES)
        few_values(rows, 4, is_bf16, t->scores[0], num_keys, a->values, offsets, d, t->sums[0][d / PANEL][0]);
    for (; d < size; d += LANES)
        few_values(rows, 1, is_bf16, t->scores[0], num_keys, a->values, offsets, d, t->sums[0][d / PANEL][0] + d % PANEL);
}

#define FEW(rows)                                                                                                                 \
    static void __attribute__((noinline)) atom_attend_few##rows(const atom_attention_args *a, tile *t, const int32_t *table,      \
                                                                int64_t kv_head, int64_t low, int64_t num_keys) {                 \
        if (a->cache_is_bf16)                                                                                                     \
            attend_few(rows, 1, a, t, table, kv_head, low, num_keys);                                                             \
        else                                                                                                                      \
            attend_few(rows, 0, a, t, table, kv_head, low, num_keys);                                                             \
    }
FEW(1)
FEW(2)
FEW(3)
FEW(4)
#endif

/* The rows' attention to positions [start, end) of those that they see. */
static void attend(const atom_attention_args *a, tile *t, int64_t seq, int64_t kv_head, int64_t num_rows, int64_t start, int64_t end) {
    int64_t size = a->head_dim, padded = ceil_div(num_rows, 16) * 16;
    const int32_t *table = a->block_tables + seq * a->table_stride;
    for (int64_t low = start, high; low < end; low = high) {
        high = min64(end, (low / KEYS + 1) * KEYS);
#if defined(V512)
        if (num_rows <= FEW_ROWS) {
            int64_t num_keys = min64(high, t->positions[num_rows - 1] + 1) - low;
            switch (num_rows) {
            case 1: atom_attend_few1(a, t, table, kv_head, low, num_keys); break;
            case 2: atom_attend_few2(a, t, table, kv_head, low, num_keys); break;
            case 3: atom_attend_few3(a, t, table, kv_head, low, num_keys); break;
            case 4: atom_attend_few4(a, t, table, kv_head, low, num_keys); break;
            }
            continue;
        }
#endif
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
            soften_panel(t, row, columns, low, num_keys, size);
            for (int64_t d = 0; d < size; d += PANEL)
                atom_prefill_values(t->scores[0], min64(columns, num_rows - row), num_keys, t->values[d / PANEL][0],
                                    min64(PANEL, size - d), t->sums[row / PANEL][d / PANEL][0]);
        }
    }
}

/* Takes a span's result into the whole. */
static void merge_rows(tile *t, int64_t num_rows, int64_t size) {
    for (int64_t row = 0; row < num_rows; row++) {
        if (t->total[row] == 0) /* has seen nothing */
            continue;
        merge_factors f = atom_merge_totals(t->whole_largest + row, t->whole_total + row, t->largest[row], t->total[row]);
        for (int64_t d = 0; d < size; d += PANEL)
            atom_merge_sums(t->whole_sums[row / PANEL][d / PANEL][row % PANEL], t->sums[row / PANEL][d / PANEL][row % PANEL], f,
                            min64(PANEL, size - d));
    }
}

/* Span by span, each from an empty state. */
static void attend_uniformly(const atom_attention_args *a, tile *t, int64_t seq, int64_t kv_head, int64_t num_rows, int64_t start,
                             int64_t end) {
    int64_t padded = ceil_div(num_rows, 16) * 16, size = a->head_dim;
    for (int64_t low = start, high; low < end; low = high) {
        high = min64(end, (low / UNIFORM_SPAN + 1) * UNIFORM_SPAN);
        clear_rows(a, t, padded);
        if (low == start) {
            memcpy(t->whole_largest, t->largest, sizeof t->largest);
            memcpy(t->whole_total, t->total, sizeof t->total);
            for (int64_t row = 0; row < num_rows; row += PANEL)
                for (int64_t d = 0; d < size; d += PANEL)
                    memset(t->whole_sums[row / PANEL][d / PANEL], 0, min64(PANEL, num_rows - row) * sizeof t->whole_sums[0][0][0]);
        }
        attend(a, t, seq, kv_head, num_rows, low, high);
        merge_rows(t, num_rows, size);
    }
}

void atom_prefill_rows(const atom_attention_args *a, char *scratch, int64_t seq, int64_t kv_head, int64_t row0, int64_t num_rows) {
    tile *t = (tile *)scratch;
    int64_t group = a->num_heads / a->num_kv_heads, size = a->head_dim, padded = ceil_div(num_rows, 16) * 16;
    begin_rows(a, t, seq, kv_head, row0, num_rows);
    int64_t end = t->positions[padded - 1] + 1, start = a->window ? max64(0, t->positions[0] - a->window + 1) : 0;
    if (a->is_uniform)
        attend_uniformly(a, t, seq, kv_head, num_rows, start, end);
    else {
        clear_rows(a, t, padded);
        for (int64_t row = 0; a->sinks && row < padded; row++) {
            t->largest[row] = a->sinks[kv_head * group + (row0 + min64(row, num_rows - 1)) % group] * LOG2E;
            t->total[row] = 1;
        }
        attend(a, t, seq, kv_head, num_rows, start, end);
    }
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t r = row0 + row, head = kv_head * group + r % group;
        float *out = a->out + (a->cu_seqlens_q[seq] + r / group) * a->ldo + head * size;
        float factor = a->is_uniform ? atom_finish_factor(a, head, t->whole_largest[row], t->whole_total[row]) : 1.0f / t->total[row];
        for (int64_t d = 0; d < size; d += LANES) {
            const float *sums = (a->is_uniform ? t->whole_sums : t->sums)[row / PANEL][d / PANEL][row % PANEL];
            v_store(out + d, v_load(sums + d % PANEL) * factor + 0.0f); /* never -0, as what merges empty spans has none */
        }
    }
}

void atom_uniform_span(const atom_attention_args *a, char *scratch, int64_t seq, int64_t kv_head, int64_t low, int64_t high,
                       decode_state *state) {
    tile *t = (tile *)scratch;
    int64_t group = a->num_heads / a->num_kv_heads, size = a->head_dim;
    begin_rows(a, t, seq, kv_head, 0, group);
    clear_rows(a, t, 16);
    attend(a, t, seq, kv_head, group, low, high);
    for (int64_t row = 0; row < group; row++) {
        state->largest[row] = t->largest[row];
        state->total[row] = t->total[row];
        for (int64_t d = 0; d < size; d += PANEL)
            memcpy(state->sums + row * size + d, t->sums[0][d / PANEL][row], sizeof(float) * min64(PANEL, size - d));
    }
}
