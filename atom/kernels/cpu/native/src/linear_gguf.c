/* Products, arg-max and row gather with weights kept as GGUF blocks. Same contracts as atom_linear and its kin (atom.h). */
#include <stdatomic.h>
#include <string.h>

#include "gguf.h"
#include "linear_core.h"
#include "linear_gguf.h"

#define MAX_TILE 512        /* rows that share one unpacking of a panel */
#define SHARED_FROM_ROWS 16 /* fewer rows are rounded by every thread for itself, which needs no barrier */

static const gguf_kernels *kernels;

/* The best instruction set, or the one called name; -1 where this processor lacks it. */
int atom_gguf_select(const char *name)
{
    const gguf_kernels *const all[] = {&gguf_avx512, &gguf_avx2, &gguf_plain};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        if ((!name || !*name || !strcmp(name, all[i]->name)) && all[i]->is_available()) {
            kernels = all[i];
            return 0;
        }
    return -1;
}

const char *atom_gguf_selected(void) { return kernels->name; }

__attribute__((constructor)) static void select_best(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    atom_gguf_select(0);
}

/* Which rows of x go in, fp32 or bf16. order NULL: all of them; else row i is x[order[i] / top_k]. */
typedef struct {
    const void *x;
    int64_t ldx;
    int32_t is_bf16;
    const int32_t *order;
    int64_t top_k;
} row_source;

/* To the nearest, ties to even; a NaN stays one. */
static inline bf16 narrow_one(float value)
{
    const union { float value; uint32_t bits; } wide = {.value = value};
    if ((wide.bits & 0x7fffffff) > 0x7f800000)
        return (bf16)(wide.bits >> 16 | 0x40);
    return (bf16)((wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16);
}

static int64_t align64(int64_t bytes) { return (bytes + 63) & -64; }

static int64_t rounded_bytes(int64_t rows, int64_t k)
{
    return align64(rows * k) + align64(rows * (k / 32) * 4) + align64(rows * (k / 16) * 4);
}

static gguf_rows rounded_at(char *memory, int64_t rows, int64_t k)
{
    char *scales = memory + align64(rows * k), *sums = scales + align64(rows * (k / 32) * 4);
    return (gguf_rows){(int8_t *)memory, (float *)scales, (int32_t *)sums, rows, k};
}

static gguf_rows rows_from(const gguf_rows *all, int64_t first, int64_t count)
{
    const int64_t k = all->k;
    return (gguf_rows){all->values + first * k, all->scales + first * (k / 32), all->sums + first * (k / 16), count, k};
}

#define WIDENED 1024 /* values of a bf16 row at a time; whole groups */

static void round_into(const gguf_rows *rows, int64_t i, const row_source *source)
{
    const int64_t k = rows->k, row = source->order ? source->order[i] / source->top_k : i;
    int8_t *values = (int8_t *)rows->values + i * k;
    float *scales = (float *)rows->scales + i * (k / 32);
    int32_t *sums = (int32_t *)rows->sums + i * (k / 16);
    if (!source->is_bf16) {
        kernels->round((const float *)source->x + row * source->ldx, k, values, scales, sums);
        return;
    }
    float wide[WIDENED];
    const bf16 *from = (const bf16 *)source->x + row * source->ldx;
    for (int64_t at = 0; at < k; at += WIDENED) {
        const int64_t count = k - at < WIDENED ? k - at : WIDENED;
        for (int64_t j = 0; j < count; j++)
            wide[j] = widen_one(from[at + j]);
        kernels->round(wide, count, values + at, scales + at / 32, sums + at / 16);
    }
}

/* All rows rounded, by all threads or by each for itself. The caller's next loop starts at 0. */
static gguf_rows round_rows(atom_worker *w, const row_source *source, int64_t m, int64_t k)
{
    const int64_t bytes = rounded_bytes(m, k);
    if (m < SHARED_FROM_ROWS && bytes + GGUF_WORK + 2 * MAX_TILE * GGUF_PANEL * 4 <= ATOM_SCRATCH / 2) {
        const gguf_rows rows = rounded_at(w->scratch + ATOM_SCRATCH / 2, m, k);
        for (int64_t i = 0; i < m; i++)
            round_into(&rows, i, source);
        return rows;
    }
    char *shared = atom_layout_memory(w, bytes);
    const gguf_rows rows = rounded_at(shared, m, k);
    for (int64_t i; (i = atom_next(w)) < m;)
        round_into(&rows, i, source);
    atom_barrier(w);
    return rows;
}

/* e^x (Cephes' polynomial, two units in the last place); plain arithmetic, so that loops over it vectorise. */
static inline float fast_exp(float x)
{
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float shifted = x * 0x1.715476p0f + 0x1.8p23f, n = shifted - 0x1.8p23f;
    const float r = x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f; /* ln 2 in two parts */
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { float value; int32_t bits; } scale = {.bits = ((int32_t)n + 127) << 23};
    return p * scale.value;
}

static inline float gated(int epilogue, float gate, float up)
{
    const float z = epilogue == ATOM_SILU_MUL ? gate : 2.0f * 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1.0f + fast_exp(-z)) * up;
}

typedef struct {
    const atom_weight *weight;
    const gguf_layout *layout;
    const uint8_t *panels;
    void *y;
    int64_t ldy;
    int32_t is_bf16;
    const int32_t *order;
} output;

/* Rows [first, first + count) of the output for panel number `panel` (a pair of panels where gate and up alternate). */
static void one_panel(atom_worker *w, const output *to, const gguf_rows *rows, int64_t panel, int64_t first)
{
    const atom_weight *weight = to->weight;
    const int is_gated = weight->epilogue == ATOM_SILU_MUL || weight->epilogue == ATOM_GELU_TANH_MUL;
    const int64_t bytes = gguf_panel_bytes(to->layout, rows->k), columns = is_gated ? weight->n / 2 : weight->n;
    float *tile = (float *)(w->scratch + GGUF_WORK), *second = tile + rows->rows * GGUF_PANEL;
    const uint8_t *from = to->panels + (is_gated ? 2 * panel : panel) * bytes;
    kernels->multiply(to->layout, from, rows, tile, w->scratch);
    if (is_gated)
        kernels->multiply(to->layout, from + bytes, rows, second, w->scratch);
    const int64_t start = panel * GGUF_PANEL, left = columns - start;
    const int64_t width = left < GGUF_PANEL ? left : GGUF_PANEL;
    for (int64_t i = 0; i < rows->rows; i++) {
        const int64_t at = (to->order ? to->order[first + i] : first + i) * to->ldy + start;
        float *values = tile + i * GGUF_PANEL, *others = second + i * GGUF_PANEL;
        if (weight->bias) {
            const float *bias = weight->bias + (is_gated ? 2 * start : start);
            for (int64_t c = 0; c < width; c++)
                values[c] += bias[c];
            for (int64_t c = 0; is_gated && c < width; c++)
                others[c] += bias[GGUF_PANEL + c];
        }
        if (is_gated)
            for (int64_t c = 0; c < GGUF_PANEL; c++)
                values[c] = gated(weight->epilogue, values[c], others[c]);
        if (to->is_bf16) {
            bf16 *out = (bf16 *)to->y + at;
            for (int64_t c = 0; c < width; c++)
                out[c] = narrow_one(weight->epilogue == ATOM_ADD ? widen_one(out[c]) + values[c] : values[c]);
        } else {
            float *out = (float *)to->y + at;
            for (int64_t c = 0; c < width; c++)
                out[c] = weight->epilogue == ATOM_ADD ? out[c] + values[c] : values[c];
        }
    }
}

static int64_t tile_rows(int64_t m)
{
    const int64_t tiles = (m + MAX_TILE - 1) / MAX_TILE;
    return (m + tiles - 1) / tiles;
}

static int64_t num_output_panels(const atom_weight *weight)
{
    const int64_t panels = (weight->n + GGUF_PANEL - 1) / GGUF_PANEL;
    return weight->epilogue == ATOM_SILU_MUL || weight->epilogue == ATOM_GELU_TANH_MUL ? (panels + 1) / 2 : panels;
}

static void linear(atom_worker *w, const atom_linear_args *a)
{
    const atom_weight *weight = a->weight;
    const row_source source = {a->x, a->ldx, a->x_is_bf16, 0, 1};
    const output to = {weight, gguf_layout_of(weight->format), weight->data, a->y, a->ldy, a->y_is_bf16, 0};
    if (a->m > 0) {
        const gguf_rows rows = round_rows(w, &source, a->m, weight->k);
        const int64_t panels = num_output_panels(weight), tile = tile_rows(a->m), tiles = (a->m + tile - 1) / tile;
        for (int64_t piece; (piece = atom_next(w)) < panels * tiles;) {
            const int64_t first = piece / panels * tile;
            const gguf_rows part = rows_from(&rows, first, a->m - first < tile ? a->m - first : tile);
            one_panel(w, &to, &part, piece % panels, first);
        }
    }
    atom_barrier(w);
}

void atom_gguf_linear(atom_worker *w, const atom_linear_args *a)
{
    if (a->weight->format != ATOM_PARTS) {
        linear(w, a);
        return;
    }
    int64_t column = 0;
    for (const atom_weight *part = a->weight->data; part->n > 0; column += part++->n) {
        atom_weight weight = *part;
        weight.epilogue = a->weight->epilogue;
        weight.bias = a->weight->bias ? a->weight->bias + column : 0;
        atom_linear_args args = *a;
        args.weight = &weight;
        args.y = (char *)a->y + column * (a->y_is_bf16 ? 2 : 4);
        linear(w, &args);
    }
}

void atom_gguf_linear_experts(atom_worker *w, const atom_weight *experts, int64_t num_experts, const int32_t *order,
                              const int32_t *offsets, int64_t top_k, const float *x, int64_t ldx, float *y, int64_t ldy)
{
    const gguf_layout *layout = gguf_layout_of(experts->format);
    const row_source source = {x, ldx, 0, order, top_k};
    const int64_t total = offsets[num_experts];
    if (total > 0) {
        const gguf_rows rows = round_rows(w, &source, total, experts->k);
        const int64_t panels = num_output_panels(experts);
        for (int64_t piece; (piece = atom_next(w)) < panels * num_experts;) {
            const int64_t e = piece / panels;
            const output to = {experts + e, layout, experts[e].data, y, ldy, 0, order};
            for (int64_t first = offsets[e]; first < offsets[e + 1]; first += MAX_TILE) {
                const int64_t left = offsets[e + 1] - first;
                const gguf_rows part = rows_from(&rows, first, left < MAX_TILE ? left : MAX_TILE);
                one_panel(w, &to, &part, piece % panels, first);
            }
        }
    }
    atom_barrier(w);
}

typedef struct {
    float value;
    int32_t id; /* -1: none yet */
} best;

static inline int is_better(float value, int64_t id, float than, int64_t than_id)
{
    return than_id < 0 || value > than || (value == than && id < than_id);
}

void atom_gguf_linear_argmax(atom_worker *w, const atom_linear_args *a, int64_t n_valid, int64_t *ids, float *values)
{
    const atom_weight *weight = a->weight;
    const int64_t m = a->m;
    static atomic_flag lock = ATOMIC_FLAG_INIT;
    static float top[MAX_TILE]; /* of all threads, in the turn of the lock */
    const gguf_layout *layout = gguf_layout_of(weight->format);
    const row_source source = {a->x, a->ldx, a->x_is_bf16, 0, 1};
    if (m <= 0) {
        atom_barrier(w);
        return;
    }
    const gguf_rows rows = round_rows(w, &source, m, weight->k);
    float *tile = (float *)(w->scratch + GGUF_WORK);
    for (int64_t first = 0; first < m; first += MAX_TILE) {
        const int64_t count = m - first < MAX_TILE ? m - first : MAX_TILE;
        const gguf_rows part = rows_from(&rows, first, count);
        best bests[MAX_TILE];
        for (int64_t i = 0; i < count; i++)
            bests[i] = (best){0.0f, -1};
        if (w->id == 0)
            for (int64_t i = first; i < first + count; i++)
                ids[i] = -1;
        const int64_t panels = (n_valid + GGUF_PANEL - 1) / GGUF_PANEL, bytes = gguf_panel_bytes(layout, weight->k);
        for (int64_t panel; (panel = atom_next(w)) < panels;) {
            kernels->multiply(layout, (const uint8_t *)weight->data + panel * bytes, &part, tile, w->scratch);
            const int64_t start = panel * GGUF_PANEL, left = n_valid - start, width = left < GGUF_PANEL ? left : GGUF_PANEL;
            for (int64_t i = 0; i < count; i++)
                for (int64_t c = 0; c < width; c++) {
                    const float value = tile[i * GGUF_PANEL + c] + (weight->bias ? weight->bias[start + c] : 0.0f);
                    if (is_better(value, start + c, bests[i].value, bests[i].id))
                        bests[i] = (best){value, (int32_t)(start + c)};
                }
        }
        atom_barrier(w);
        while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire))
            ;
        for (int64_t i = 0; i < count; i++)
            if (bests[i].id >= 0 && is_better(bests[i].value, bests[i].id, top[i], ids[first + i])) {
                top[i] = bests[i].value;
                ids[first + i] = bests[i].id;
                if (values)
                    values[first + i] = top[i];
            }
        atomic_flag_clear_explicit(&lock, memory_order_release);
        atom_barrier(w);
    }
}
