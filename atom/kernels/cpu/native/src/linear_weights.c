/* Weights into panels, and rows back out of them. */
#include "linear_core.h"
#include "linear_gguf.h"

#include <math.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#define SEGMENT 16 /* dwords of a row that are transposed at a time */

/* values [count] of a row, from column k, as fp32. */
INLINE void load_row(const atom_pack_args *a, int64_t row, int64_t k, int count, float *out) {
    if (a->is_bf16) {
        const bf16 *from = (const bf16 *)a->weight + row * a->ld + k;
        for (int i = 0; i < count; i += VL) store_f(out + i, widen(*(const vh_mem *)(from + i)));
    } else {
        memcpy(out, (const float *)a->weight + row * a->ld + k, (size_t)count * 4);
    }
}

/* The largest |value| over 127, so that round(value / scale) is an int8; 0 for a row of zeros. */
static float int8_scale(const atom_pack_args *a, int64_t row) {
    float values[GROUP];
    vf best = all_f(0);
    for (int64_t k = 0; k < a->k; k += GROUP) {
        load_row(a, row, k, GROUP, values);
        for (int i = 0; i < GROUP; i += VL) best = max_f(abs_f(load_f(values + i)), best);
    }
    return highest(best) / 127.0f;
}

/* Nibbles q and the scale d (a bf16) of 32 values, value = d (q - 8). Of six scales that put the value of the largest
 * magnitude near -8 or 7, the one with the smallest squared error. */
static bf16 int4_group(const float *values, uint8_t *nibbles) {
    static const float steps[] = {-8.0f, -7.5f, -7.0f, -8.5f, 7.0f, 7.5f};
    vf top = load_f(values), bottom = -top;
    for (int i = VL; i < GROUP; i += VL) {
        top = max_f(top, load_f(values + i));
        bottom = max_f(bottom, -load_f(values + i));
    }
    const float above = highest(top), below = highest(bottom), extreme = above > below ? above : -below;
    bf16 best_scale = 0;
    float best_error = INFINITY;
    memset(nibbles, 8, GROUP);
    for (int s = 0; s < 6; s++) {
        bf16 narrowed[VL];
        *(vh_mem *)narrowed = narrow(all_f(extreme / steps[s]));
        const float scale = widen_one(narrowed[0]);
        if (fabsf(scale) < 1e-30f) continue;
        const vf inverse = all_f(1.0f / scale);
        vi q[GROUP / VL];
        vf errors = all_f(0);
        for (int i = 0; i < GROUP / VL; i++) {
            vf v = load_f(values + i * VL);
            vf level = to_f(round_i(min_f(max_f(v * inverse, all_f(-8)), all_f(7))));
            vf error = level * all_f(scale) - v;
            errors = fma_f(error, error, errors);
            q[i] = round_i(level) + 8;
        }
        const float error = total(errors);
        if (!(error < best_error)) continue;
        best_error = error;
        best_scale = narrowed[0];
        for (int i = 0; i < GROUP / VL; i++) *(vb_mem *)(nibbles + i * VL) = __builtin_convertvector(q[i], vb);
    }
    return best_scale;
}

/* Dwords [first, first + SEGMENT) of a row in its panel's format (not INT4). */
INLINE void row_dwords(const atom_pack_args *a, int64_t row, int64_t first, float inverse, uint32_t *out, int32_t *sum) {
    float values[SEGMENT * 4];
    if (a->format == ATOM_F32) {
        load_row(a, row, first, SEGMENT, (float *)out);
    } else if (a->format == ATOM_BF16) {
        if (a->is_bf16) {
            memcpy(out, (const bf16 *)a->weight + row * a->ld + first * 2, SEGMENT * 4);
            return;
        }
        load_row(a, row, first * 2, SEGMENT * 2, values);
        for (int i = 0; i < SEGMENT * 2; i += VL) *(vh_mem *)((bf16 *)out + i) = narrow(load_f(values + i));
    } else {
        const int count = a->k - first * 4 < SEGMENT * 4 ? (int)(a->k - first * 4) : SEGMENT * 4;
        load_row(a, row, first * 4, count, values);
        vi quads = all_i(0);
        for (int i = 0; i < count; i += VL) {
            vi q = round_i(min_f(max_f(load_f(values + i) * all_f(inverse), all_f(-127)), all_f(127)));
            quads += q;
            *(vb_mem *)((int8_t *)out + i) = __builtin_convertvector(q, vb);
        }
        for (int i = 0; i < VL; i++) *sum += quads[i];
    }
}

static void pack_panel(const atom_pack_args *a, int64_t panel, const int64_t *rows) {
    const int is_int8 = a->format == ATOM_INT8 || a->format == ATOM_INT8_A8;
    const int64_t steps = atom_panel_offset(a->format, a->k) / STEP_BYTES;
    uint32_t *to = (uint32_t *)((char *)a->data + panel * atom_panel_offset(a->format, a->k));
    float inverse[PANEL] = {0};
    int32_t sums[PANEL] = {0};
    for (int j = 0; is_int8 && j < PANEL; j++) {
        float scale = rows[j] < 0 ? 0 : int8_scale(a, rows[j]);
        a->scales[panel * PANEL + j] = scale;
        inverse[j] = scale > 1e-36f ? 1.0f / scale : 0;
    }
    for (int64_t s = 0; s < steps; s += SEGMENT) {
        uint32_t block[PANEL][SEGMENT];
        const int64_t length = steps - s < SEGMENT ? steps - s : SEGMENT;
        for (int j = 0; j < PANEL; j++) {
            if (rows[j] < 0)
                memset(block[j], 0, sizeof block[j]);
            else
                row_dwords(a, rows[j], s, inverse[j], block[j], &sums[j]);
        }
        for (int64_t i = 0; i < length; i++)
            for (int j = 0; j < PANEL; j++) to[(s + i) * PANEL + j] = block[j][i];
    }
    if (is_int8) memcpy(a->sums + panel * PANEL, sums, sizeof sums);
}

static void pack_int4_panel(const atom_pack_args *a, int64_t panel, const int64_t *rows) {
    char *to = (char *)a->data + panel * atom_panel_offset(ATOM_INT4, a->k);
    for (int64_t g = 0; g < a->k / GROUP; g++, to += GROUP_BYTES) {
        uint8_t *bytes = (uint8_t *)to + PANEL * 2;
        for (int j = 0; j < PANEL; j++) {
            float values[GROUP] = {0};
            uint8_t nibbles[GROUP];
            if (rows[j] >= 0) load_row(a, rows[j], g * GROUP, GROUP, values);
            ((bf16 *)to)[j] = int4_group(values, nibbles);
            for (int i = 0; i < 16; i++) bytes[(i / 4) * STEP_BYTES + j * 4 + i % 4] = nibbles[i] | nibbles[i + 16] << 4;
        }
    }
}

void atom_pack_weight(atom_worker *w, const atom_pack_args *a) {
    const int64_t per_part = a->is_gated ? a->n / 2 : a->n, parts = a->is_gated ? 2 : 1;
    const int64_t num_panels = parts * ((per_part + PANEL - 1) / PANEL);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const int64_t huge = 2 << 20, bytes = num_panels * atom_panel_offset(a->format, a->k);
    const uintptr_t start = ((uintptr_t)a->data + huge - 1) / huge * huge;
    if (w->id == 0 && bytes >= 4 * huge) madvise((void *)start, (size_t)((uintptr_t)a->data + bytes - start), MADV_HUGEPAGE);
    atom_barrier(w); /* before the first touch */
#endif
    for (int64_t panel; (panel = atom_next(w)) < num_panels;) {
        int64_t rows[PANEL];
        for (int64_t j = 0; j < PANEL; j++) {
            int64_t row = panel / parts * PANEL + j;
            rows[j] = row < per_part ? panel % parts * per_part + row : -1;
        }
        if (a->data == a->weight) {
            const int64_t bytes = atom_panel_offset(a->format, a->k);
            atom_pack_args aside = *a;
            aside.data = w->scratch - panel * bytes;
            pack_panel(&aside, panel, rows);
            memcpy((char *)a->data + panel * bytes, w->scratch, (size_t)bytes);
        } else if (a->format == ATOM_INT4)
            pack_int4_panel(a, panel, rows);
        else
            pack_panel(a, panel, rows);
    }
    atom_barrier(w);
}

/* One row of the weight (not gated), widened and scaled. */
static void gather_row(const atom_weight *weight, int64_t row, float scale, float *y) {
    const int64_t k = weight->k, column = row % PANEL;
    const char *panel = (const char *)weight->data + row / PANEL * atom_panel_offset(weight->format, k);
    const uint32_t *dwords = (const uint32_t *)panel + column;
    switch (weight->format) {
    case ATOM_F32:
        for (int64_t i = 0; i < k; i++) y[i] = ((const float *)panel)[i * PANEL + column] * scale;
        break;
    case ATOM_BF16:
        for (int64_t i = 0; i < k / 2; i++) {
            uint32_t pair = dwords[i * PANEL];
            y[2 * i] = widen_one((uint16_t)pair) * scale;
            y[2 * i + 1] = widen_one((uint16_t)(pair >> 16)) * scale;
        }
        break;
    case ATOM_INT4:
        for (int64_t g = 0; g < k / GROUP; g++, panel += GROUP_BYTES) {
            const float step = widen_one(((const bf16 *)panel)[column]) * scale;
            for (int64_t i = 0; i < 16; i++) {
                int byte = (uint8_t)panel[PANEL * 2 + i / 4 * STEP_BYTES + column * 4 + i % 4];
                y[g * GROUP + i] = (float)((byte & 15) - 8) * step;
                y[g * GROUP + 16 + i] = (float)((byte >> 4) - 8) * step;
            }
        }
        break;
    default:
        for (int64_t i = 0; i < k / 4; i++) {
            int8_t quad[4];
            memcpy(quad, &dwords[i * PANEL], 4);
            for (int j = 0; j < 4; j++) y[4 * i + j] = (float)quad[j] * (weight->scales[row] * scale);
        }
    }
}

void atom_gather_rows(atom_worker *w, const atom_weight *weight, const int64_t *ids, int64_t m, float scale, float *y, int64_t ldy) {
    for (int64_t i; (i = atom_next(w)) < m;) {
        if (ids[i] < 0 || ids[i] >= weight->n)
            memset(y + i * ldy, 0, (size_t)weight->k * 4);
        else if (atom_is_gguf(weight))
            atom_gguf_gather_row(weight, ids[i], scale, y + i * ldy);
        else
            gather_row(weight, ids[i], scale, y + i * ldy);
    }
    atom_barrier(w);
}

void atom_gather_run(atom_worker *w, const atom_gather_args *a) {
    atom_gather_rows(w, a->weight, a->ids, a->m, a->scale, a->y, a->ldy);
}
