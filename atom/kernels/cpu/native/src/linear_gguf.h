/* What the products of linear_*.c call for a weight that holds GGUF blocks, whole or in parts. */
#ifndef ATOM_LINEAR_GGUF_H
#define ATOM_LINEAR_GGUF_H

#include "atom.h"

static inline int atom_is_gguf(const atom_weight *weight) { return weight->format >= ATOM_Q4_0; }

void atom_gguf_linear(atom_worker *w, const atom_linear_args *a);
void atom_gguf_linear_argmax(atom_worker *w, const atom_linear_args *a, int64_t n_valid, int64_t *ids, float *values);
void atom_gguf_linear_experts(atom_worker *w, const atom_weight *experts, int64_t num_experts, const int32_t *order,
                              const int32_t *offsets, int64_t top_k, const float *x, int64_t ldx, float *y, int64_t ldy);
void atom_gguf_gather_row(const atom_weight *weight, int64_t row, float scale, float *y);

#endif
