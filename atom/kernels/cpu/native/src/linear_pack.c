/* Activations laid out for the tiles: interleaved by row, and rounded as the weight's format asks. */
#include "linear_core.h"

#include <stdlib.h>

void atom_make_plan(atom_plan *plan, const atom_weight *weight, int64_t m) {
    int format = weight->format, product = PRODUCT_F32, parts = 1, values = 1;
    if (format == ATOM_BF16 && HAS_DOT_BF16) {
        product = PRODUCT_BF16;
        values = 2;
    } else if (format == ATOM_BF16) {
        product = PRODUCT_WIDE;
    } else if (format == ATOM_INT8 || format == ATOM_INT8_A8) {
        product = PRODUCT_U8;
        parts = format == ATOM_INT8 ? 2 : 1;
        values = 4;
    } else if (format == ATOM_INT4) {
        product = PRODUCT_INT4;
        values = 4;
    }
    int few = atom_tile_rows(product, 1) / parts, many = atom_tile_rows(product, 0) / parts;
    plan->product = product;
    plan->format = format;
    plan->parts = parts;
    plan->k = weight->k;
    plan->steps = weight->k / values;
    plan->num_tiles = m <= few ? (m > 0) : (m + many - 1) / many;
    plan->rows = plan->num_tiles ? (int)((m + plan->num_tiles - 1) / plan->num_tiles) : 1;
    plan->num_tiles = (m + plan->rows - 1) / plan->rows;
    int64_t floats = plan->steps * plan->rows * parts;
    if (product == PRODUCT_U8) floats += plan->rows;
    if (product == PRODUCT_INT4) floats += 2 * (plan->k / GROUP) * plan->rows;
    plan->tile_bytes = (floats * 4 + 63) / 64 * 64;
    plan->panel_bytes = atom_panel_offset(format, plan->k);
}

INLINE vf load_x(const void *x, int is_bf16, int64_t i) {
    return is_bf16 ? widen(*(const vh_mem *)((const bf16 *)x + i)) : load_f((const float *)x + i);
}

INLINE void store_bytes(void *p, vi v) { *(vb_mem *)p = __builtin_convertvector(v, vb); }

/* Largest |x|; *poison becomes NaN if one is not finite, else 0. */
INLINE float largest(const void *x, int is_bf16, int64_t count, float *poison) {
    vf best = all_f(0), bad = all_f(0);
    for (int64_t i = 0; i < count; i += VL) {
        vf v = load_x(x, is_bf16, i);
        best = max_f(best, abs_f(v));
        bad = fma_f(v, all_f(0), bad);
    }
    *poison = total(bad);
    return highest(best);
}

/* u8 = round(x / scale) + 128, scale = largest |x| / 127; returns the scale. */
INLINE float round_row(const void *x, int is_bf16, int64_t k, uint8_t *out) {
    float poison, best = largest(x, is_bf16, k, &poison);
    vf inverse = all_f(best > 0 && best < 1e38f ? 127.0f / best : 0);
    for (int64_t i = 0; i < k; i += VL) store_bytes(out + i, round_i(load_x(x, is_bf16, i) * inverse) + 128);
    return best / 127.0f + poison;
}

/* The same with 16 bits, scale = largest |x| / (127 * 256): value = 256 (high - 128) + (low - 128). */
INLINE float round_row_twice(const void *x, int is_bf16, int64_t k, uint8_t *high, uint8_t *low) {
    float poison, best = largest(x, is_bf16, k, &poison);
    vf inverse = all_f(best > 1e-30f && best < 1e38f ? 32512.0f / best : 0);
    for (int64_t i = 0; i < k; i += VL) {
        vi q = round_i(load_x(x, is_bf16, i) * inverse), upper = (q + 128) >> 8;
        store_bytes(high + i, upper + 128);
        store_bytes(low + i, q - (upper << 8) + 128);
    }
    return best / 32512.0f + poison;
}

/* s8 with a scale for every 32 values; start = -8 times their sum, which takes the offset out of 4-bit weights. */
INLINE void round_groups(const void *x, int is_bf16, int64_t k, int8_t *out, float *scales, int32_t *starts, int stride) {
    for (int64_t g = 0; g < k / GROUP; g++) {
        const void *group = is_bf16 ? (const void *)((const bf16 *)x + g * GROUP) : (const void *)((const float *)x + g * GROUP);
        float poison, best = largest(group, is_bf16, GROUP, &poison);
        vf inverse = all_f(best > 1e-35f && best < 1e38f ? 127.0f / best : 0);
        vi quads = all_i(0);
        for (int i = 0; i < GROUP; i += VL) {
            vi q = round_i(load_x(group, is_bf16, i) * inverse);
            quads += q;
            store_bytes(out + g * GROUP + i, q);
        }
        int32_t sum = 0;
        for (int i = 0; i < VL; i++) sum += quads[i];
        scales[g * stride] = best / 127.0f + poison;
        starts[g * stride] = -8 * sum;
    }
}

/* Column by column: out[s * count + r] = rows[r][s] for s < steps. */
static void interleave(const uint32_t *rows, int64_t ld, int count, int64_t steps, uint32_t *out) {
    int64_t s = 0;
    if (count == 1) {
        memcpy(out, rows, (size_t)steps * 4);
        return;
    }
#if VL == 16
    /* 16 x 16 at a time. Each column is stored whole; what it writes beyond `count` rows the next column overwrites, so the
     * last block, which has no room behind it, is left to the loop below. */
    for (; (steps - s - 15) * count >= 16; s += 16) {
        __m512i row[16], pair[16];
        for (int r = 0; r < 16; r++) row[r] = _mm512_loadu_si512(rows + (r < count ? r : count - 1) * ld + s);
        for (int r = 0; r < 16; r += 2) {
            pair[r] = _mm512_unpacklo_epi32(row[r], row[r + 1]);
            pair[r + 1] = _mm512_unpackhi_epi32(row[r], row[r + 1]);
        }
        for (int r = 0; r < 16; r += 4) {
            row[r] = _mm512_unpacklo_epi64(pair[r], pair[r + 2]);
            row[r + 1] = _mm512_unpackhi_epi64(pair[r], pair[r + 2]);
            row[r + 2] = _mm512_unpacklo_epi64(pair[r + 1], pair[r + 3]);
            row[r + 3] = _mm512_unpackhi_epi64(pair[r + 1], pair[r + 3]);
        }
        /* row[4 q + c] holds columns c, 4 + c, 8 + c, 12 + c of rows 4 q ... 4 q + 3. */
        for (int c = 0; c < 4; c++) {
            __m512i low = _mm512_shuffle_i32x4(row[c], row[4 + c], 0x44), high = _mm512_shuffle_i32x4(row[c], row[4 + c], 0xee);
            __m512i low2 = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0x44);
            __m512i high2 = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0xee);
            pair[c] = _mm512_shuffle_i32x4(low, low2, 0x88);
            pair[4 + c] = _mm512_shuffle_i32x4(low, low2, 0xdd);
            pair[8 + c] = _mm512_shuffle_i32x4(high, high2, 0x88);
            pair[12 + c] = _mm512_shuffle_i32x4(high, high2, 0xdd);
        }
        for (int c = 0; c < 16; c++) _mm512_storeu_si512(out + (s + c) * count, pair[c]);
    }
#endif
    for (; s < steps; s++)
        for (int r = 0; r < count; r++) out[s * count + r] = rows[r * ld + s];
}

void atom_pack_tile(const atom_plan *plan, const atom_job *job, int64_t tile, char *memory, uint32_t *room) {
    const int rows = atom_tile_rows_of(plan, tile, job->m), is_bf16 = job->x_is_bf16;
    const int64_t k = plan->k, steps = plan->steps;
    atom_tile_memory to = atom_tile_parts(plan, memory, rows);
    for (int r = 0; r < rows; r++) {
        int64_t from = atom_x_row(job, tile * plan->rows + r) * job->ldx;
        const void *x = is_bf16 ? (const void *)((const bf16 *)job->x + from) : (const void *)((const float *)job->x + from);
        uint32_t *row = room + r * plan->parts * steps;
        switch (plan->format) {
        case ATOM_INT8_A8:
            to.row_scales[r] = round_row(x, is_bf16, k, (uint8_t *)row);
            break;
        case ATOM_INT8:
            to.row_scales[r] = round_row_twice(x, is_bf16, k, (uint8_t *)row, (uint8_t *)(row + steps));
            break;
        case ATOM_INT4:
            round_groups(x, is_bf16, k, (int8_t *)row, to.group_scales + r, to.group_starts + r, rows);
            break;
        default:
            if (plan->product == PRODUCT_BF16)
                for (int64_t i = 0; i < k; i += VL) *(vh_mem *)((bf16 *)row + i) = narrow(load_x(x, is_bf16, i));
            else
                for (int64_t i = 0; i < k; i += VL) store_f((float *)row + i, load_x(x, is_bf16, i));
        }
    }
    interleave(room, steps, rows * plan->parts, steps, to.main);
}

void *atom_layout_memory(atom_worker *w, int64_t bytes) {
    static void *memory; /* of the process: runs do not overlap */
    static int64_t size;
    if (w->id == 0 && bytes > size) {
        free(memory);
        if (posix_memalign(&memory, 4096, (size_t)bytes) != 0) abort(); /* bounded by SHARED_BYTES and one tile row */
        size = bytes;
    }
    atom_barrier(w);
    return memory;
}
