/* The inner loops: up to 14 rows of activations against one panel of 64 columns.
 *
 * Every product has the same shape. A step is one dword of each of the panel's 64 columns (256 bytes) and one dword of
 * each row: an fp32 value, two bf16, or four bytes. Rows are interleaved, [steps][rows], so a tile reads one stream.
 * An accumulator is one chain over ascending steps, whatever the number of rows: a row's bits do not depend on M.
 */
#ifndef ATOM_LINEAR_TILE_H
#define ATOM_LINEAR_TILE_H

#include "linear_vec.h"

#define PANEL 64
#define STEP_BYTES (PANEL * 4)
#define GROUP 32                              /* of k, for INT4 */
#define GROUP_BYTES (PANEL * 2 + PANEL * 16)  /* scales, then nibbles */
#define MAX_TILE_ROWS 14

enum atom_product {
    PRODUCT_F32,  /* fp32 weights */
    PRODUCT_WIDE, /* bf16 weights widened in registers; two fp32 dwords of each row a step */
    PRODUCT_BF16, /* bf16 pairs on both sides */
    PRODUCT_U8,   /* u8 activations, s8 weights: s32 sums */
    PRODUCT_INT4, /* s8 activations with a scale a group, 4-bit weights: fp32 sums */
    NUM_PRODUCTS
};

/* What a tile function works on. */
typedef struct {
    const uint32_t *a;  /* [steps][rows] dwords (PRODUCT_WIDE: [2 steps][rows]) */
    const char *b;      /* the panel, at its first step */
    int64_t steps;      /* PRODUCT_INT4: eight a group */
    uint32_t *c;        /* [rows][64] sums, added to */
    const char *ahead;  /* prefetched into the second cache, */
    int64_t ahead_step; /* so many bytes a step (INT4: half a step) of each pass over a part of the columns */
    const float *group_scales;   /* [steps / 8][rows], PRODUCT_INT4 */
    const int32_t *group_starts; /* [steps / 8][rows]: -8 times the sum of the group's activations */
} atom_tile;

typedef void (*atom_tile_function)(const atom_tile *tile);

/* The function for a tile of `rows` rows; NULL if this processor or build has none. */
atom_tile_function atom_tile_for(int product, int rows);
/* Rows that a tile may have: few, where all four quarters of a panel are accumulated at once, or many. */
int atom_tile_rows(int product, int is_few);
/* Passes that a tile of `rows` rows makes over a panel, each over a part of the columns. */
int atom_tile_passes(int product, int rows);

INLINE void prefetch(const char *p) { __builtin_prefetch(p, 0, 2); }

/* rows x lanes accumulators over the panel's columns, `width` vectors at a time. */
INLINE void tile_body(const int product, const int rows, const int width, const atom_tile *t) {
    const int lines = width * VL * 4 / 64 > 0 ? width * VL * 4 / 64 : 1;
    const char *ahead = t->ahead;
    const int64_t ahead_step = t->ahead_step, second_line = ahead_step > 64 ? 64 : 0, steps = t->steps;
    const uint32_t *const first_a = t->a, *const first_b = (const uint32_t *)t->b;
    uint32_t *const sums = t->c;
    for (int col = 0; col < PANEL; col += width * VL) {
        const uint32_t *a = first_a, *b = first_b + col;
        vi acc[MAX_TILE_ROWS][4];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < width; c++) acc[r][c] = (vi)load_u(sums + r * PANEL + col + c * VL);
        int64_t s = steps;
        do { /* at least one step */
            vu w[4], half[4];
#pragma GCC unroll 4
            for (int i = 0; i < lines; i++) prefetch(ahead + (i == 1 ? second_line : i * 64));
            ahead += ahead_step;
#pragma GCC unroll 4
            for (int c = 0; c < width; c++) {
                w[c] = load_u(b + c * VL);
                if (product == PRODUCT_WIDE) half[c] = w[c] << 16;
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                const vu x = (vu)all_i((int32_t)a[r]);
#pragma GCC unroll 4
                for (int c = 0; c < width; c++) {
                    if (product == PRODUCT_F32) acc[r][c] = (vi)fma_f((vf)x, (vf)w[c], (vf)acc[r][c]);
                    if (product == PRODUCT_WIDE) acc[r][c] = (vi)fma_f((vf)x, (vf)half[c], (vf)acc[r][c]);
                    if (product == PRODUCT_U8) acc[r][c] = dot4(acc[r][c], x, w[c]);
#if HAS_DOT_BF16
                    if (product == PRODUCT_BF16) acc[r][c] = (vi)dot2_bf16((vf)acc[r][c], x, w[c]);
#endif
                }
            }
            if (product == PRODUCT_WIDE) {
                a += rows;
#pragma GCC unroll 4
                for (int c = 0; c < width; c++) half[c] = w[c] & 0xffff0000u;
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++) {
                    const vu x = (vu)all_i((int32_t)a[r]);
#pragma GCC unroll 4
                    for (int c = 0; c < width; c++)
                        acc[r][c] = (vi)fma_f((vf)x, (vf)half[c], (vf)acc[r][c]);
                }
            }
            a += rows;
            b += PANEL;
        } while (--s);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < width; c++) store_u(sums + r * PANEL + col + c * VL, (vu)acc[r][c]);
    }
}

/* The same for INT4: an integer chain over each group, then one fused multiply-add with the two scales. */
INLINE void tile_int4_body(const int rows, const int width, const atom_tile *t) {
    const int lines = width * VL * 4 / 64 + 1;
    const int64_t num_groups = t->steps / 8, ahead_step = t->ahead_step;
    const char *ahead = t->ahead, *const first_group = t->b;
    const uint32_t *const first_a = t->a;
    const float *const first_scale = t->group_scales;
    const int32_t *const first_start = t->group_starts;
    float *const sums = (float *)t->c;
    for (int col = 0; col < PANEL; col += width * VL) {
        const uint32_t *a = first_a;
        const char *group = first_group;
        const float *group_scales = first_scale;
        const int32_t *group_starts = first_start;
        vf sum[MAX_TILE_ROWS][4];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < width; c++) sum[r][c] = load_f(sums + r * PANEL + col + c * VL);
        for (int64_t g = 0; g < num_groups; g++) {
            const uint32_t *nibbles = (const uint32_t *)(group + PANEL * 2) + col;
            vi acc[MAX_TILE_ROWS][4];
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int c = 0; c < width; c++) acc[r][c] = all_i(group_starts[r]);
#pragma GCC unroll 1
            for (int quad = 0; quad < 4; quad++) {
                vu w[4];
#pragma GCC unroll 4
                for (int i = 0; i < lines; i++) prefetch(ahead + i * 64);
                ahead += ahead_step;
#pragma GCC unroll 4
                for (int c = 0; c < width; c++) w[c] = load_u(nibbles + c * VL) & 0x0f0f0f0fu;
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++) {
                    const vu x = (vu)all_i((int32_t)a[r]);
#pragma GCC unroll 4
                    for (int c = 0; c < width; c++) acc[r][c] = dot4(acc[r][c], w[c], x);
                }
#pragma GCC unroll 4
                for (int c = 0; c < width; c++) w[c] = (load_u(nibbles + c * VL) >> 4) & 0x0f0f0f0fu;
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++) {
                    const vu x = (vu)all_i((int32_t)a[4 * rows + r]);
#pragma GCC unroll 4
                    for (int c = 0; c < width; c++) acc[r][c] = dot4(acc[r][c], w[c], x);
                }
                a += rows;
                nibbles += PANEL;
            }
            const uint16_t *scales = (const uint16_t *)group + col;
#pragma GCC unroll 4
            for (int c = 0; c < width; c++) {
                const vf scale = widen(*(const vh_mem *)(scales + c * VL));
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++)
                    sum[r][c] = fma_f(to_f(acc[r][c]), scale * all_f(group_scales[r]), sum[r][c]);
            }
            a += 4 * rows;
            group_scales += rows;
            group_starts += rows;
            group += GROUP_BYTES;
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < width; c++) store_f(sums + r * PANEL + col + c * VL, sum[r][c]);
    }
}

#endif
