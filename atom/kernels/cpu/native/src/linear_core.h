/* How a product is carried out: the shape of the activations' tiles, and the job that the driver runs. */
#ifndef ATOM_LINEAR_CORE_H
#define ATOM_LINEAR_CORE_H

#include "atom.h"
#include "linear_tile.h"

#define MAX_K 65536          /* s32 sums of u8 x s8 stay below 2^31 */
#define BLOCK_ROWS 256
#define BLOCK_STEPS 512      /* dwords of a row that a tile runs through before the next tile: 28 KB of 14 rows */
#define SHARED_BYTES (64 << 20) /* of activations laid out at a time */

#define PRIVATE_ROWS 4 /* so few rows each thread lays out for itself: cheaper than meeting the others */

/* Parts of a thread's scratch. Sums: two panels (gate, up) of BLOCK_ROWS rows, twice that for INT8. */
#define SUMS_BYTES (BLOCK_ROWS * 2 * STEP_BYTES)
#define SCRATCH_ROOM (2 * SUMS_BYTES)
#define SCRATCH_TILE (SCRATCH_ROOM + PRIVATE_ROWS * MAX_K * 4)

typedef struct {
    int product;        /* of atom_product */
    int format;
    int parts;          /* dwords rows of a row: 2 for INT8, whose activations are two bytes */
    int rows;           /* of a tile; the last one may have fewer */
    int64_t k, steps;   /* dwords of a row in a part */
    int64_t num_tiles, tile_bytes;
    int64_t panel_bytes;
} atom_plan;

/* A tile's parts in memory. */
typedef struct {
    uint32_t *main;        /* [steps][rows * parts] */
    float *row_scales;     /* [rows], int8 */
    float *group_scales;   /* [k / 32][rows], INT4 */
    int32_t *group_starts; /* [k / 32][rows], INT4 */
} atom_tile_memory;

typedef struct {
    float value;
    int64_t id;
} atom_best;

/* y = x W^T for m rows, or the best column of each. */
typedef struct {
    const atom_weight *weight;
    const void *x;
    void *y;
    int64_t ldx, ldy, m;
    int32_t x_is_bf16, y_is_bf16;
    const int32_t *order; /* row i is x[order[i] / x_divisor] and y[order[i]]; NULL: x[i] and y[i] */
    int64_t x_divisor;
    atom_best *best; /* [m] of this thread, instead of y */
    int64_t n_valid;
} atom_job;

INLINE int64_t atom_x_row(const atom_job *job, int64_t i) { return job->order ? job->order[i] / job->x_divisor : i; }
INLINE int64_t atom_y_row(const atom_job *job, int64_t i) { return job->order ? job->order[i] : i; }

INLINE int atom_is_gated(const atom_weight *w) { return w->epilogue == ATOM_SILU_MUL || w->epilogue == ATOM_GELU_TANH_MUL; }
/* Panels of a weight; a gated one has as many of gate as of up. */
INLINE int64_t atom_num_panels(const atom_weight *w) {
    return atom_is_gated(w) ? 2 * ((w->n / 2 + PANEL - 1) / PANEL) : (w->n + PANEL - 1) / PANEL;
}

/* Bytes from a panel's start to column k of the weight. */
INLINE int64_t atom_panel_offset(int format, int64_t k) {
    switch (format) {
    case ATOM_BF16: return k * PANEL * 2;
    case ATOM_INT4: return k / GROUP * GROUP_BYTES;
    case ATOM_F32: return k * PANEL * 4;
    default: return k * PANEL;
    }
}

void atom_make_plan(atom_plan *plan, const atom_weight *weight, int64_t m);
INLINE int atom_tile_rows_of(const atom_plan *plan, int64_t tile, int64_t m) {
    int64_t left = m - tile * plan->rows;
    return left < plan->rows ? (int)left : plan->rows;
}
INLINE atom_tile_memory atom_tile_parts(const atom_plan *plan, char *tile, int rows) {
    atom_tile_memory parts = {.main = (uint32_t *)tile};
    char *behind = tile + plan->steps * rows * plan->parts * 4;
    parts.row_scales = parts.group_scales = (float *)behind;
    parts.group_starts = (int32_t *)(parts.group_scales + plan->k / GROUP * rows);
    return parts;
}

/* Lay out rows of x as tile number `tile` in memory; room: the tile's dwords once more. */
void atom_pack_tile(const atom_plan *plan, const atom_job *job, int64_t tile, char *memory, uint32_t *room);

/* Turn sums [rows * parts][64] of rows [first, first + rows) of the job, unit `unit`, into y or into best. */
void atom_finish(const atom_plan *plan, const atom_job *job, int64_t unit, int64_t first, int rows,
                 const float *row_scales, const uint32_t *sums, const uint32_t *up_sums);

/* Memory that all threads share until the kernel ends, larger than atom_shared: every thread calls it; it is a barrier. */
void *atom_layout_memory(atom_worker *w, int64_t bytes);

#endif
