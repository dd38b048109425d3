/* What follows a product: scales, bias, the epilogue, fp32 or bf16 rows, or the arg-max. */
#include "linear_core.h"

#include <math.h>

#define VECTORS (PANEL / VL)

typedef struct {
    vf v[VECTORS];
} columns;

/* The panel's 64 products of one row. */
INLINE columns values_of(const atom_plan *plan, const atom_weight *weight, int64_t panel, float row_scale, const uint32_t *sums) {
    columns out;
    for (int c = 0; c < VECTORS; c++) {
        const int64_t col = panel * PANEL + c * VL;
        vf value;
        if (plan->product == PRODUCT_U8) {
            vi offset = (vi)load_u((const uint32_t *)weight->sums + col) << 7;
            vi sum = (vi)load_u(sums + c * VL) - offset;
            value = to_f(sum);
            if (plan->parts == 2) value = fma_f(value, all_f(256), to_f((vi)load_u(sums + PANEL + c * VL) - offset));
            value *= all_f(row_scale) * load_f(weight->scales + col);
        } else {
            value = load_f((const float *)sums + c * VL);
        }
        if (weight->bias) value += load_f(weight->bias + col);
        out.v[c] = value;
    }
    return out;
}

INLINE vf silu(vf x) { return x / (all_f(1) + exp_f(-x)); }

/* x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as x times the logistic function of twice the argument. */
INLINE vf gelu_tanh(vf x) {
    vf inner = x * fma_f(x * x, all_f(0.044715f * 0.7978845608f), all_f(0.7978845608f));
    return x / (all_f(1) + exp_f(inner * all_f(-2)));
}

INLINE void store_row(const atom_job *job, int64_t row, int64_t col, int64_t num_columns, int adds, columns v) {
    if (num_columns >= PANEL && !job->y_is_bf16) {
        float *y = (float *)job->y + row * job->ldy + col;
        for (int c = 0; c < VECTORS; c++) store_f(y + c * VL, adds ? load_f(y + c * VL) + v.v[c] : v.v[c]);
        return;
    }
    if (num_columns >= PANEL) {
        bf16 *y = (bf16 *)job->y + row * job->ldy + col;
        for (int c = 0; c < VECTORS; c++) {
            vh_mem *to = (vh_mem *)(y + c * VL);
            *to = narrow(adds ? widen(*to) + v.v[c] : v.v[c]);
        }
        return;
    }
    float wide[PANEL];
    bf16 narrowed[PANEL];
    for (int c = 0; c < VECTORS; c++) store_f(wide + c * VL, v.v[c]);
    if (!job->y_is_bf16) {
        float *y = (float *)job->y + row * job->ldy + col;
        for (int64_t i = 0; i < num_columns; i++) y[i] = adds ? y[i] + wide[i] : wide[i];
        return;
    }
    bf16 *y = (bf16 *)job->y + row * job->ldy + col;
    for (int64_t i = 0; adds && i < num_columns; i++) wide[i] += widen_one(y[i]);
    for (int c = 0; c < VECTORS; c++) *(vh_mem *)(narrowed + c * VL) = narrow(load_f(wide + c * VL));
    memcpy(y, narrowed, (size_t)num_columns * 2);
}

/* Keep the panel's largest value if it beats the row's; panels come in ascending order, so a tie keeps the lower id. */
INLINE void update_best(atom_best *best, int64_t first, int64_t n_valid, columns v) {
    if (first >= n_valid) return;
    if (first + PANEL <= n_valid) {
        vf top = v.v[0];
        for (int c = 1; c < VECTORS; c++) top = max_f(top, v.v[c]);
        if (!(highest(top) > best->value)) return;
    }
    float wide[PANEL];
    for (int c = 0; c < VECTORS; c++) store_f(wide + c * VL, v.v[c]);
    for (int64_t i = 0; i < PANEL && first + i < n_valid; i++) {
        if (wide[i] > best->value) {
            best->value = wide[i];
            best->id = first + i;
        }
    }
}

void atom_finish(const atom_plan *plan, const atom_job *job, int64_t unit, int64_t first, int rows,
                 const float *row_scales, const uint32_t *sums, const uint32_t *up_sums) {
    const atom_weight *weight = job->weight;
    const int is_gated = atom_is_gated(weight);
    const int64_t stride = (int64_t)plan->parts * PANEL, col = unit * PANEL;
    const int64_t num_columns = (is_gated ? weight->n / 2 : weight->n) - col;
    for (int r = 0; r < rows; r++, sums += stride, up_sums += stride) {
        const float scale = plan->product == PRODUCT_U8 ? row_scales[r] : 1;
        columns v = values_of(plan, weight, is_gated ? 2 * unit : unit, scale, sums);
        if (job->best) {
            update_best(&job->best[first + r], col, job->n_valid, v);
            continue;
        }
        if (is_gated) {
            columns up = values_of(plan, weight, 2 * unit + 1, scale, up_sums);
            for (int c = 0; c < VECTORS; c++)
                v.v[c] = (weight->epilogue == ATOM_SILU_MUL ? silu(v.v[c]) : gelu_tanh(v.v[c])) * up.v[c];
        }
        store_row(job, atom_y_row(job, first + r), col, num_columns, weight->epilogue == ATOM_ADD, v);
    }
}
