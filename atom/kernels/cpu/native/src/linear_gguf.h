/* What the products of linear_*.c call for a weight whose format is one of GGUF's. */
#ifndef ATOM_LINEAR_GGUF_H
#define ATOM_LINEAR_GGUF_H

#include "atom.h"

void atom_gguf_linear(atom_worker *w, const atom_weight *weight, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t m);
void atom_gguf_linear_argmax(atom_worker *w, const atom_weight *weight, const float *x, int64_t ldx, int64_t m, int64_t n_valid,
                             int64_t *ids, float *values);
void atom_gguf_gather_rows(atom_worker *w, const atom_weight *weight, const int64_t *ids, int64_t m, float scale, float *y,
                           int64_t ldy);
void atom_gguf_linear_experts(atom_worker *w, const atom_weight *experts, int64_t num_experts, const int32_t *order,
                              const int32_t *offsets, int64_t top_k, const float *x, int64_t ldx, float *y, int64_t ldy);

#endif
