/* Norms, rotation with the cache write, gated activations: rows of fp32, a few passes over what stays in L1. */
#include "simd.h"

#include <math.h>

#define PIECE 4096 /* elements a piece, about 2 us: fewer cost more to hand out than to work on */

static float factor_of(float squares, int64_t size, float eps) { return 1.0f / sqrtf(squares / (float)size + eps); }

static float sum_of_squares(const float *x, int64_t size) {
    vf sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            vf part = v_load(x + i + j * LANES);
            sums[j] += part * part;
        }
    for (; i + LANES <= size; i += LANES) {
        vf part = v_load(x + i);
        sums[0] += part * part;
    }
    if (i < size) {
        vf part = v_load_some(x + i, size - i);
        sums[0] += part * part;
    }
    return v_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* out = x * factor * weight; out may be x. */
static void scale_row(const float *x, float factor, const float *weight, float *out, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        v_store(out + i, v_load(x + i) * factor * v_load(weight + i));
    if (i < size)
        v_store_some(out + i, v_load_some(x + i, size - i) * factor * v_load_some(weight + i, size - i), size - i);
}

/* sum += delta * factor * weight (weight NULL: 1). */
static void add_row(const float *delta, float factor, const float *weight, float *sum, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vf part = v_load(delta + i);
        if (weight)
            part *= factor * v_load(weight + i);
        v_store(sum + i, v_load(sum + i) + part);
    }
    if (i < size) {
        vf part = v_load_some(delta + i, size - i);
        if (weight)
            part *= factor * v_load_some(weight + i, size - i);
        v_store_some(sum + i, v_load_some(sum + i, size - i) + part, size - i);
    }
}

void atom_add_rms_norm(atom_worker *w, const atom_norm_args *a) {
    int64_t rows = max64(1, PIECE / max64(1, a->size)), size = a->size;
    for (int64_t row; (row = atom_next(w) * rows) < a->m;) {
        for (int64_t end = min64(a->m, row + rows); row < end; row++) {
            const float *x = a->delta ? a->delta + row * size : NULL;
            if (a->residual) {
                float *residual = a->residual + row * size;
                if (x)
                    add_row(x, a->delta_norm ? factor_of(sum_of_squares(x, size), size, a->eps) : 1.0f, a->delta_norm, residual,
                            size);
                x = residual;
            }
            scale_row(x, factor_of(sum_of_squares(x, size), size, a->eps), a->weight, a->out + row * size, size);
        }
    }
    atom_barrier(w);
}

/* The pairs (x[i], x[i + half]) by their angles. */
static void rotate(float *x, const float *cos, const float *sin, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf first = v_load(x + i), second = v_load(x + half + i), c = v_load(cos + i), s = v_load(sin + i);
        v_store(x + i, first * c - second * s);
        v_store(x + half + i, second * c + first * s);
    }
    for (; i < half; i++) {
        float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
    }
}

static void store_to_cache(const float *x, void *cache, int64_t offset, int64_t size, int is_bf16) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vf value = v_finite_or_zero(v_load(x + i));
        if (is_bf16)
            v_store_bf16((bf16 *)cache + offset + i, value);
        else
            v_store((float *)cache + offset + i, value);
    }
    if (i < size) {
        vf value = v_finite_or_zero(v_load_some(x + i, size - i));
        if (is_bf16) {
            bf16 rounded[LANES];
            v_store_bf16(rounded, value);
            memcpy((bf16 *)cache + offset + i, rounded, 2 * (size - i));
        } else
            v_store_some((float *)cache + offset + i, value, size - i);
    }
}

void atom_rope_and_cache(atom_worker *w, const atom_rope_args *a) {
    int64_t heads = a->num_heads + 2 * a->num_kv_heads, size = a->head_dim, half = a->rotary_dim / 2;
    int64_t units = a->m * heads, piece = max64(1, PIECE / size);
    for (int64_t unit; (unit = atom_next(w) * piece) < units;) {
        for (int64_t end = min64(units, unit + piece); unit < end; unit++) {
            int64_t token = unit / heads, head = unit % heads, slot = a->slots[token];
            int64_t kv_head = head < a->num_heads ? -1 : (head - a->num_heads) % a->num_kv_heads;
            int is_value = head >= a->num_heads + a->num_kv_heads;
            float *x = a->qkv + token * a->ld + head * size;
            if (!is_value) {
                if (a->qk_weight)
                    scale_row(x, factor_of(sum_of_squares(x, size), size, a->eps), a->qk_weight + head * size, x, size);
                rotate(x, a->cos + token * half, a->sin + token * half, half);
            }
            if (kv_head >= 0 && slot >= 0) {
                int64_t block = slot / a->block_size, place = slot % a->block_size;
                int64_t offset = ((block * a->num_kv_heads + kv_head) * a->block_size + place) * size;
                store_to_cache(x, is_value ? a->values : a->keys, offset, size, a->cache_is_bf16);
            }
        }
    }
    atom_barrier(w);
}

/* Angles are products in fp32 as the models were trained with; the reduction by pi / 2 and the series are in fp64, which
 * a million radians need. */
void atom_rotation(atom_worker *w, const int64_t *positions, int64_t m, const float *inv_freq, int32_t half, float factor,
                   float *cos, float *sin) {
    int64_t rows = max64(1, PIECE / 8 / max64(1, half));
    for (int64_t row; (row = atom_next(w) * rows) < m;) {
        for (int64_t end = min64(m, row + rows); row < end; row++) {
            float position = (float)positions[row];
            for (int64_t i = 0; i < half; i++) {
                double angle = (double)(float)(position * inv_freq[i]);
                double shifted = angle * 0.63661977236758134 + 6755399441055744.0; /* 1.5 * 2^52: rounds to an integer */
                double turns = shifted - 6755399441055744.0;
                double x = angle - turns * 1.5707963267948966, y = x * x; /* [-pi / 4, pi / 4] */
                int64_t quadrant;
                memcpy(&quadrant, &shifted, 8);
                double s = x * (1 + y * (-1.0 / 6 + y * (1.0 / 120 + y * (-1.0 / 5040 + y * (1.0 / 362880)))));
                double c = 1 + y * (-0.5 + y * (1.0 / 24 + y * (-1.0 / 720 + y * (1.0 / 40320 - y * (1.0 / 3628800)))));
                double sine = quadrant & 1 ? c : s, cosine = quadrant & 1 ? s : c;
                sin[row * half + i] = factor * (float)(quadrant & 2 ? -sine : sine);
                cos[row * half + i] = factor * (float)((quadrant + 1) & 2 ? -cosine : cosine);
            }
        }
    }
    atom_barrier(w);
}

void atom_rotation_rows(atom_worker *w, const atom_rotation_args *a) {
    atom_rotation(w, a->positions, a->m, a->inv_freq, a->half, a->factor, a->cos, a->sin);
}

void atom_gated_activation(atom_worker *w, const atom_gated_args *a) {
    int64_t columns = ceil_div(a->n, PIECE), width = min64(a->n, PIECE);
    int64_t rows = max64(1, PIECE / max64(1, width)), pieces = ceil_div(a->m, rows) * columns;
    for (int64_t piece; (piece = atom_next(w)) < pieces;) {
        int64_t first = piece % columns * PIECE, end = min64(a->n, first + PIECE);
        for (int64_t row = piece / columns * rows; row < min64(a->m, (piece / columns + 1) * rows); row++) {
            const float *gate = a->x + row * a->ldx, *up = gate + a->n;
            float *y = a->y + row * a->ldy;
            for (int64_t i = first; i < end; i += LANES) {
                int64_t n = end - i;
                vf g = n < LANES ? v_load_some(gate + i, n) : v_load(gate + i);
                vf u = n < LANES ? v_load_some(up + i, n) : v_load(up + i);
                vf result = (a->activation == ATOM_SILU_MUL ? v_silu(g) : v_gelu_tanh(g)) * u;
                if (n < LANES)
                    v_store_some(y + i, result, n);
                else
                    v_store(y + i, result);
            }
        }
    }
    atom_barrier(w);
}
