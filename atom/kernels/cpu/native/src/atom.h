/* What the native CPU kernels share: the team of threads, tensors' layouts, and every kernel's signature.
 *
 * A kernel is an SPMD function: all threads of the team call it with the same arguments, take pieces of its work with
 * atom_next(), and leave it through atom_barrier(). So kernels follow each other without a fork or a join, and one
 * decode step is one atom_run(). Activations are fp32 rows; weights keep their own format.
 */
#ifndef ATOM_H
#define ATOM_H

#include <stddef.h>
#include <stdint.h>

typedef uint16_t bf16;

/* ---- threads (threads.c) ---- */

typedef struct atom_team atom_team;
typedef struct {
    atom_team *team;
    int id, num_threads; /* this thread's number in the team */
    char *scratch;       /* this thread's own, 64-byte aligned, at least ATOM_SCRATCH bytes */
    uint32_t sense, patience; /* of the barrier: passed so far, ns to spin */
} atom_worker;

#define ATOM_SCRATCH (4 << 20)

typedef void (*atom_body)(atom_worker *worker, const void *arguments);

/* Let all threads of the process's team run body; returns when all have. Threads are started on first use. */
void atom_run(atom_body body, const void *arguments);
/* The same with the calling thread only (num_threads 1): for work that is smaller than waking the others. */
void atom_run_alone(atom_body body, const void *arguments);
/* Size of the team, and the CPUs [num_threads] that its threads are pinned to (NULL: not pinned). Thread 0 is the caller
 * and stays free: what it is pinned to, the threads that it starts later would inherit. Waits for a run under way. */
void atom_set_threads(int num_threads, const int *cpus);
int atom_num_threads(void);
/* The next piece of the current loop, 0, 1, 2 ...; the caller stops at its own count. Costs 0.1-0.2 us when others draw too:
 * a piece should take several us. */
int64_t atom_next(atom_worker *worker);
/* Memory that all threads of a run share, ATOM_SHARED bytes, 64-byte aligned; a kernel leaves nothing in it. */
char *atom_shared(atom_worker *worker);
#define ATOM_SHARED (8 << 20)
/* All threads meet; the next loop starts at 0. Spins for up to 20 us, then yields. */
void atom_barrier(atom_worker *worker);

/* ---- products (linear_*.c) ---- */

enum atom_format {
    ATOM_BF16 = 0,      /* [n/64][k/2][64][2] bf16 */
    ATOM_INT8 = 1,      /* [n/64][k/4][64][4] s8, a scale a column; activations stay wide (weight only) */
    ATOM_INT8_A8 = 2,   /* the same layout; activations rounded to u8 = q + 128, a scale a row */
    ATOM_INT4 = 3,      /* groups of 32 of k: per panel 64 bf16 scales, then 1 KB of nibbles (low: k, high: k + 16) */
    ATOM_F32 = 4,       /* [n/64][k][64] */
    /* GGUF blocks regrouped into panels, values unchanged (gguf.h) */
    ATOM_Q4_0 = 8, ATOM_Q8_0 = 9, ATOM_Q4_K = 10, ATOM_Q6_K = 11, ATOM_Q5_0 = 12, ATOM_Q5_K = 13,
    ATOM_PARTS = 14 /* data: weights of these formats, one behind the other in y, the last followed by one with n = 0 */
};

enum atom_epilogue { ATOM_STORE = 0, ATOM_ADD = 1, ATOM_SILU_MUL = 2, ATOM_GELU_TANH_MUL = 3 };

/* A packed weight [n, k]: y = x W^T + bias. n is padded to whole panels of 64 (padding is zero); k is a multiple of 32, at
 * most 65536. With an activation epilogue panels alternate gate, up (each padded by itself) and the output has n / 2 columns.
 * scales, sums and bias are in the order of the packed columns, and padded like them. */
typedef struct {
    int32_t format, epilogue;
    int32_t n, k;
    const void *data;
    const float *scales;   /* where the format has one a column, else NULL */
    const int32_t *sums;   /* column sums of int8 weights, else NULL */
    const float *bias;     /* or NULL */
} atom_weight;

/* Rows' bits depend neither on m nor on the rows beside them, in any format: sums are exact integers, or one chain of
 * fused multiply-adds over ascending k. INT8 rounds activations to 16 bits (one scale a row), INT8_A8 to 8 (one scale a row),
 * INT4 to 8 (one scale for 32 of k). What is not finite in a row makes the row NaN. */

/* y [m, ldy] = epilogue(x [m, ldx] W^T + bias); x and y do not overlap. */
void atom_linear(atom_worker *w, const atom_weight *weight, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t m);
/* The same as a body of atom_run, over rows of fp32 or bf16. */
typedef struct {
    const atom_weight *weight;
    const void *x;
    void *y;
    int64_t ldx, ldy, m;
    int32_t x_is_bf16, y_is_bf16;
} atom_linear_args;
void atom_linear_run(atom_worker *w, const atom_linear_args *a);
/* Ids and values of the largest product of each row, the lowest id on ties, columns below n_valid only; logits are not
 * stored. soft caps do not move an arg-max and are the caller's. */
void atom_linear_argmax(atom_worker *w, const atom_weight *weight, const float *x, int64_t ldx, int64_t m, int64_t n_valid,
                        int64_t *ids, float *values);
typedef struct {
    atom_linear_args product; /* y is not used */
    int64_t n_valid;
    int64_t *ids;
    float *values; /* or NULL */
} atom_linear_argmax_args;
void atom_linear_argmax_run(atom_worker *w, const atom_linear_argmax_args *a);
/* Rows ids[0..m) of the weight, widened: y [m, ldy] = scale * W[ids]; zeros for an id that is no row. Not of a gated weight. */
void atom_gather_rows(atom_worker *w, const atom_weight *weight, const int64_t *ids, int64_t m, float scale, float *y, int64_t ldy);
typedef struct {
    const atom_weight *weight;
    const int64_t *ids;
    float *y;
    int64_t m, ldy;
    float scale;
} atom_gather_args;
void atom_gather_run(atom_worker *w, const atom_gather_args *a);
/* Expert e's rows are order[offsets[e] .. offsets[e + 1]), each row number once over all experts:
 * y[row] = epilogue(x[row / top_k] W_e^T). An expert without rows costs nothing. */
void atom_linear_experts(atom_worker *w, const atom_weight *experts, int64_t num_experts, const int32_t *order,
                         const int32_t *offsets, int64_t top_k, const float *x, int64_t ldx, float *y, int64_t ldy);
typedef struct {
    const atom_weight *experts;
    const int32_t *order, *offsets; /* [offsets[num_experts]], [num_experts + 1] */
    const float *x;
    float *y;
    int64_t num_experts, top_k, ldx, ldy;
} atom_experts_args;
void atom_linear_experts_run(atom_worker *w, const atom_experts_args *a);

/* Pack weight [n, k] (rows of stride ld, fp32 or bf16) into data, and scales and sums where the format has them.
 * INT8: scale = largest |value| of the row / 127, q = round(value / scale). INT4: for each 32 of a row, a bf16 scale d and
 * q = round(value / d) + 8 in 0..15; of six scales near the extreme value / -8 the one of the smallest squared error.
 * Gated: the first n / 2 rows are gate, the others up.
 * data may be weight itself where each panel takes the place of its own rows: BF16 from bf16 or F32 from fp32, ld = k, whole
 * panels, not gated, and a panel within ATOM_SCRATCH. */
typedef struct {
    const void *weight;
    int64_t ld, n, k;
    int32_t is_bf16, is_gated, format, unused;
    void *data;
    float *scales;
    int32_t *sums;
} atom_pack_args;
void atom_pack_weight(atom_worker *w, const atom_pack_args *a);

/* ---- elementwise.c ---- */

/* y = w * x / sqrt(mean(x^2) + eps); with post, residual += that norm first: see atom_norm_args. */
typedef struct {
    float *residual;         /* [m, size] running sum, or NULL */
    const float *delta;      /* [m, size] what is added to the residual before the norm, or NULL */
    const float *delta_norm; /* [size] norm applied to delta before it is added (Gemma), or NULL */
    const float *weight;     /* [size] */
    float *out;              /* [m, size] norm of the residual */
    int64_t m, size;
    float eps;
} atom_norm_args;
void atom_add_rms_norm(atom_worker *w, const atom_norm_args *a);

/* Normalise (optional) and rotate the q and k heads of qkv rows in place, half-split pairs, and write k and v of each token
 * to the cache slots; a slot < 0 is not written, and what is not finite is written as 0. */
typedef struct {
    float *qkv; /* [m, (heads + 2 kv_heads) * head_dim] */
    int64_t ld;
    int32_t num_heads, num_kv_heads, head_dim, rotary_dim;
    const float *qk_weight;      /* [heads + kv_heads, head_dim] or NULL */
    float eps;
    const float *cos, *sin;      /* [m, rotary_dim / 2] */
    void *keys, *values;         /* [blocks, kv_heads, block_size, head_dim] */
    int32_t cache_is_bf16;       /* else fp32 */
    int32_t block_size;
    const int64_t *slots;        /* [m] */
    int64_t m;
} atom_rope_args;
void atom_rope_and_cache(atom_worker *w, const atom_rope_args *a);
void atom_rotation(atom_worker *w, const int64_t *positions, int64_t m, const float *inv_freq, int32_t half, float factor,
                   float *cos, float *sin);
typedef struct {
    const int64_t *positions; /* [m] */
    int64_t m;
    const float *inv_freq; /* [half] */
    int32_t half;
    float factor;
    float *cos, *sin; /* [m, half] */
} atom_rotation_args;
void atom_rotation_rows(atom_worker *w, const atom_rotation_args *a); /* the same as a body of atom_run */

/* y = act(gate) * up of rows [gate n | up n]; activation: ATOM_SILU_MUL or ATOM_GELU_TANH_MUL. */
typedef struct {
    const float *x; /* [m, 2 n], row stride ldx */
    int64_t ldx;
    float *y; /* [m, n], row stride ldy */
    int64_t ldy, m, n;
    int32_t activation;
} atom_gated_args;
void atom_gated_activation(atom_worker *w, const atom_gated_args *a);

/* ---- attention*.c ---- */

/* Causal attention of every sequence's queries over its pages (decode: one query; prefill: many), grouped heads. */
typedef struct {
    const float *q; /* [tokens, ...], row stride ldq, heads side by side */
    int64_t ldq;
    float *out;     /* [tokens, heads * head_dim] */
    int64_t ldo;
    int32_t num_heads, num_kv_heads, head_dim, block_size, cache_is_bf16; /* head_dim: a multiple of 16, at most 512 */
    float scale, soft_cap;  /* soft_cap 0: none */
    int32_t window;         /* 0: none; else a query sees itself and window - 1 before it */
    const float *sinks;     /* [heads] or NULL */
    const void *keys, *values;
    const int32_t *block_tables; /* [seqs, table_stride] */
    int64_t table_stride;
    const int32_t *cu_seqlens_q; /* [seqs + 1] */
    const int32_t *context_lens; /* [seqs], the step's tokens included; 0: write zeros */
    int64_t num_seqs, num_tokens; /* tokens behind the last sequence's are zeroed */
    /* 1: a token alone is computed as prefill computes many, so that its bits do not depend on how many come with it; slower
     * for one token. Without it they do not depend on the other sequences or on the threads, only on the way taken. */
    int32_t is_uniform;
} atom_attention_args;
void atom_attention(atom_worker *w, const atom_attention_args *a);

/* ---- sampling.c ---- */

/* The best id of each row, the lowest on ties; NaN counts as the best. */
typedef struct {
    const float *x; /* [m, n], row stride ldx */
    int64_t ldx, m, n;
    int64_t *ids;
    float *values;
} atom_argmax_args;
void atom_argmax_rows(atom_worker *w, const atom_argmax_args *a);

/* Sampled ids [m] of logits x (finite or -inf) as kernels/reference/sampling.py's `choose`. */
#define ATOM_MAX_VOCAB 400000 /* what a thread's scratch holds */
typedef struct {
    const float *x; /* [m, n], row stride ldx */
    int64_t ldx, m, n;
    const float *best, *temperature, *top_p, *min_p, *uniforms;
    const int32_t *top_k; /* below 1: off */
    int64_t *ids;
} atom_choose_args;
void atom_choose_rows(atom_worker *w, const atom_choose_args *a);

#endif
