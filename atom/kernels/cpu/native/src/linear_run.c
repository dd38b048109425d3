/* The driver of all products: lays out activations, hands out panels, and finishes their sums.
 *
 * A piece of work is a block of rows against a unit of columns: a panel, or a gate panel and its up panel. Which thread
 * takes it, and beside which rows, moves no bit of the result: see linear_tile.h.
 */
#include "linear_core.h"
#include "linear_gguf.h"

#include <math.h>
#include <stdlib.h>

#define STREAM_AHEAD 4096  /* bytes that a single pass over a panel prefetches ahead of itself */
#define MAX_AHEAD_TILES 16 /* with more, reading a panel takes no time beside its products */

/* Sums of tiles [tile, tile + count) against one panel. */
static void multiply(const atom_plan *plan, int64_t m, char *tiles, int64_t tile, int64_t count,
                     const char *panel, const char *next_panel, uint32_t *sums) {
    const int64_t per_tile = (int64_t)plan->rows * plan->parts * PANEL;
    const int64_t k_of_step = plan->product == PRODUCT_F32 ? 1 : plan->product <= PRODUCT_BF16 ? 2 : 4;
    const int64_t block = count > 1 ? BLOCK_STEPS * (plan->k / plan->steps) : plan->k;
    memset(sums, 0, (size_t)(count * per_tile * 4));
    for (int64_t k = 0; k < plan->k; k += block) {
        const int64_t length = plan->k - k < block ? plan->k - k : block;
        const int64_t offset = atom_panel_offset(plan->format, k);
        const int64_t first_step = k * plan->steps / plan->k;
        const char *b = panel + offset;
        const int is_int4 = plan->product == PRODUCT_INT4;
        const int64_t turns = is_int4 ? length / 8 : length / k_of_step; /* of a tile's inner loop */
        const int64_t passes = atom_tile_passes(plan->product, plan->rows * plan->parts);
        const int64_t bytes = is_int4 ? GROUP_BYTES / 4 : STEP_BYTES; /* of the panel a turn */
        for (int64_t t = 0; t < count; t++) {
            const int rows = atom_tile_rows_of(plan, tile + t, m);
            const int64_t ahead_step = (bytes + passes * count - 1) / (passes * count);
            atom_tile_memory memory = atom_tile_parts(plan, tiles + (tile + t) * plan->tile_bytes, rows);
            atom_tile arguments = {
                .a = memory.main + first_step * rows * plan->parts,
                .b = b,
                .steps = length / k_of_step,
                .c = sums + t * per_tile,
                .group_scales = memory.group_scales + k / GROUP * rows,
                .group_starts = memory.group_starts + k / GROUP * rows,
            };
            if (count == 1 && rows <= PRIVATE_ROWS) {
                arguments.ahead = b + STREAM_AHEAD;
                arguments.ahead_step = ahead_step;
            } else if (next_panel && count <= MAX_AHEAD_TILES) { /* all of the next panel, spread over the tiles */
                arguments.ahead = next_panel + offset + t * passes * turns * ahead_step;
                arguments.ahead_step = ahead_step;
            } else {
                arguments.ahead = b;
            }
            atom_tile_for(plan->product, rows * plan->parts)(&arguments);
        }
    }
}

/* One piece: rows of tiles [tile, tile + count) against units [unit, unit + num_units); next_unit comes after them. */
static void run_piece(atom_worker *w, const atom_plan *plan, const atom_job *job, char *tiles, int64_t tile, int64_t count,
                      int64_t unit, int64_t num_units, int64_t next_unit) {
    const int panels = atom_is_gated(job->weight) ? 2 : 1;
    const char *const data = job->weight->data;
    uint32_t *sums[2] = {(uint32_t *)w->scratch, (uint32_t *)(w->scratch + SUMS_BYTES)};
    for (int64_t u = unit; u < unit + num_units; u++) {
        for (int i = 0; i < panels; i++) {
            const char *panel = data + (u * panels + i) * plan->panel_bytes, *next = panel + plan->panel_bytes;
            if (i + 1 == panels && u + 1 == unit + num_units)
                next = next_unit < 0 ? NULL : data + next_unit * panels * plan->panel_bytes;
            multiply(plan, job->m, tiles, tile, count, panel, next, sums[i]);
        }
        for (int64_t t = 0; t < count; t++) {
            const int rows = atom_tile_rows_of(plan, tile + t, job->m);
            const int64_t offset = t * plan->rows * plan->parts * PANEL;
            atom_tile_memory memory = atom_tile_parts(plan, tiles + (tile + t) * plan->tile_bytes, rows);
            atom_finish(plan, job, u, (tile + t) * plan->rows, rows, memory.row_scales, sums[0] + offset, sums[1] + offset);
        }
    }
}

/* How a job is cut into pieces. */
typedef struct {
    int64_t block_tiles, num_blocks;   /* of rows */
    int64_t piece_units, num_groups;   /* of columns */
    int64_t num_units;
} cut;

static cut cut_job(const atom_worker *w, const atom_plan *plan, const atom_job *job) {
    cut c;
    c.num_units = atom_num_panels(job->weight) / (atom_is_gated(job->weight) ? 2 : 1);
    const int64_t wanted = 8 * (int64_t)w->num_threads;
    c.piece_units = c.num_units / wanted < 1 ? 1 : c.num_units / wanted > 8 ? 8 : c.num_units / wanted;
    int64_t rows = BLOCK_ROWS;
    while (rows > 64 && (c.num_units / c.piece_units) * ((job->m + rows - 1) / rows) < wanted) rows /= 2;
    c.block_tiles = rows / plan->rows < 1 ? 1 : rows / plan->rows;
    c.num_blocks = (plan->num_tiles + c.block_tiles - 1) / c.block_tiles;
    c.num_groups = (c.num_units + c.piece_units - 1) / c.piece_units;
    return c;
}

static void run_cut(atom_worker *w, const atom_plan *plan, const atom_job *job, char *tiles, const cut *c, int64_t piece,
                    int64_t next_piece) {
    const int64_t unit = piece / c->num_blocks * c->piece_units, tile = piece % c->num_blocks * c->block_tiles;
    const int64_t units = c->num_units - unit, count = plan->num_tiles - tile;
    const int64_t next_unit = next_piece < c->num_groups * c->num_blocks ? next_piece / c->num_blocks * c->piece_units : -1;
    run_piece(w, plan, job, tiles, tile, count < c->block_tiles ? count : c->block_tiles, unit,
              units < c->piece_units ? units : c->piece_units, next_unit);
}

/* All of a job whose rows each thread lays out for itself; ends without a barrier. */
static void run_few(atom_worker *w, const atom_job *job) {
    atom_plan plan;
    atom_make_plan(&plan, job->weight, job->m);
    char *tiles = w->scratch + SCRATCH_TILE;
    for (int64_t t = 0; t < plan.num_tiles; t++)
        atom_pack_tile(&plan, job, t, tiles + t * plan.tile_bytes, (uint32_t *)(w->scratch + SCRATCH_ROOM));
    const cut c = cut_job(w, &plan, job);
    for (int64_t next, piece = atom_next(w); piece < c.num_groups * c.num_blocks; piece = next) {
        next = atom_next(w); /* early: its first panel is prefetched */
        run_cut(w, &plan, job, tiles, &c, piece, next);
    }
}

/* Jobs `job` with weight + e and rows order[offsets[e] .. offsets[e + 1]) for e in [0, count); offsets NULL: one whole job. */
static atom_job job_of(const atom_job *job, const int32_t *offsets, int64_t e) {
    atom_job one = *job;
    if (offsets) {
        one.weight += e;
        one.order += offsets[e];
        one.m = offsets[e + 1] - offsets[e];
    }
    return one;
}

static void run_many(atom_worker *w, const atom_job *job, const int32_t *offsets, int64_t count) {
    for (int64_t first = 0, end; first < count; first = end) {
        int64_t bytes = 0;
        for (end = first; end < count && (end == first || bytes < SHARED_BYTES); end++) {
            atom_job one = job_of(job, offsets, end);
            atom_plan plan;
            atom_make_plan(&plan, one.weight, one.m);
            bytes += plan.num_tiles * plan.tile_bytes;
        }
        char *shared = atom_layout_memory(w, bytes);
        for (int is_product = 0; is_product < 2; is_product++) {
            char *tiles = shared;
            int64_t index = 0, drawn = atom_next(w); /* pieces of the jobs before e; this thread's piece */
            for (int64_t e = first; e < end; e++) {
                atom_job one = job_of(job, offsets, e);
                if (one.m == 0) continue;
                atom_plan plan;
                atom_make_plan(&plan, one.weight, one.m);
                const cut c = cut_job(w, &plan, &one);
                const int64_t pieces = is_product ? c.num_groups * c.num_blocks : plan.num_tiles;
                for (int64_t next; drawn < index + pieces; drawn = next) {
                    const int64_t piece = drawn - index;
                    next = atom_next(w);
                    if (is_product)
                        run_cut(w, &plan, &one, tiles, &c, piece, next - index);
                    else
                        atom_pack_tile(&plan, &one, piece, tiles + piece * plan.tile_bytes, (uint32_t *)(w->scratch + SCRATCH_ROOM));
                }
                index += pieces;
                tiles += plan.num_tiles * plan.tile_bytes;
            }
            atom_barrier(w);
        }
    }
}

/* A whole product, so many rows at a time that their layout stays small; ends with a barrier. */
static void run_rows(atom_worker *w, const atom_job *job) {
    int64_t at_once = SHARED_BYTES / (4 * (int64_t)job->weight->k);
    at_once = at_once < BLOCK_ROWS ? BLOCK_ROWS : at_once > 2048 ? 2048 : at_once;
    for (int64_t row = 0; row < job->m; row += at_once) {
        atom_job part = *job;
        part.m = job->m - row < at_once ? job->m - row : at_once;
        part.x = (const char *)job->x + row * job->ldx * (job->x_is_bf16 ? 2 : 4);
        part.y = (char *)job->y + row * job->ldy * (job->y_is_bf16 ? 2 : 4);
        part.best = job->best ? job->best + row : NULL;
        if (part.m <= PRIVATE_ROWS) {
            run_few(w, &part);
            atom_barrier(w);
        } else {
            run_many(w, &part, NULL, 1);
        }
    }
}

void atom_linear(atom_worker *w, const atom_weight *weight, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t m) {
    const atom_linear_args a = {.weight = weight, .x = x, .y = y, .ldx = ldx, .ldy = ldy, .m = m};
    atom_linear_run(w, &a);
}

void atom_linear_run(atom_worker *w, const atom_linear_args *a) {
    if (atom_is_gguf(a->weight)) {
        atom_gguf_linear(w, a);
        return;
    }
    const atom_job job = {
        .weight = a->weight,
        .x = a->x,
        .y = a->y,
        .ldx = a->ldx,
        .ldy = a->ldy,
        .m = a->m,
        .x_is_bf16 = a->x_is_bf16,
        .y_is_bf16 = a->y_is_bf16,
    };
    run_rows(w, &job);
}

void atom_linear_experts(atom_worker *w, const atom_weight *experts, int64_t num_experts, const int32_t *order,
                         const int32_t *offsets, int64_t top_k, const float *x, int64_t ldx, float *y, int64_t ldy) {
    if (num_experts > 0 && atom_is_gguf(experts)) {
        atom_gguf_linear_experts(w, experts, num_experts, order, offsets, top_k, x, ldx, y, ldy);
        return;
    }
    const atom_job job = {
        .weight = experts, .x = x, .y = y, .ldx = ldx, .ldy = ldy, .order = order, .x_divisor = top_k};
    run_many(w, &job, offsets, num_experts);
}

void atom_linear_experts_run(atom_worker *w, const atom_experts_args *a) {
    atom_linear_experts(w, a->experts, a->num_experts, a->order, a->offsets, a->top_k, a->x, a->ldx, a->y, a->ldy);
}

/* Rows whose best columns are searched at a time: the threads' candidates are kept side by side. */
#define ARGMAX_ROWS 1024

static void argmax_rows(atom_worker *w, const atom_linear_args *a, int64_t row, int64_t m, int64_t n_valid, int64_t *ids,
                        float *values) {
    static atom_best *candidates; /* [num_threads][ARGMAX_ROWS], of the process */
    static int num_threads;
    if (w->id == 0 && w->num_threads > num_threads) {
        free(candidates);
        candidates = malloc(sizeof(atom_best) * ARGMAX_ROWS * (size_t)w->num_threads);
        if (candidates == NULL) abort();
        num_threads = w->num_threads;
    }
    atom_barrier(w);
    atom_best *mine = candidates + (int64_t)w->id * ARGMAX_ROWS;
    for (int64_t i = 0; i < m; i++) mine[i] = (atom_best){.value = -INFINITY, .id = 0};
    const atom_job job = {
        .weight = a->weight,
        .x = (const char *)a->x + row * a->ldx * (a->x_is_bf16 ? 2 : 4),
        .y = NULL,
        .ldx = a->ldx,
        .m = m,
        .x_is_bf16 = a->x_is_bf16,
        .best = mine,
        .n_valid = n_valid < a->weight->n ? n_valid : a->weight->n,
    };
    run_rows(w, &job);
    for (int64_t i = w->id; i < m; i += w->num_threads) {
        atom_best best = candidates[i];
        for (int t = 1; t < w->num_threads; t++) {
            atom_best other = candidates[(int64_t)t * ARGMAX_ROWS + i];
            if (other.value > best.value || (other.value == best.value && other.id < best.id)) best = other;
        }
        ids[row + i] = best.id;
        if (values) values[row + i] = best.value;
    }
    atom_barrier(w);
}

static void argmax(atom_worker *w, const atom_linear_args *a, int64_t n_valid, int64_t *ids, float *values) {
    if (atom_is_gguf(a->weight)) {
        atom_gguf_linear_argmax(w, a, n_valid, ids, values);
        return;
    }
    for (int64_t row = 0; row < a->m; row += ARGMAX_ROWS)
        argmax_rows(w, a, row, a->m - row < ARGMAX_ROWS ? a->m - row : ARGMAX_ROWS, n_valid, ids, values);
}

void atom_linear_argmax(atom_worker *w, const atom_weight *weight, const float *x, int64_t ldx, int64_t m, int64_t n_valid,
                        int64_t *ids, float *values) {
    const atom_linear_args a = {.weight = weight, .x = x, .ldx = ldx, .m = m};
    argmax(w, &a, n_valid, ids, values);
}

void atom_linear_argmax_run(atom_worker *w, const atom_linear_argmax_args *a) {
    argmax(w, &a->product, a->n_valid, a->ids, a->values);
}
