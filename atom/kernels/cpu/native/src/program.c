/* A decoder as a list of operations. The whole team runs a step of it, from token ids to the best ids or the logits
 * of the rows that sample, in one call.
 *
 * Operations name their buffers by address; what changes from step to step (rows, tables, slots) is put in here.
 */
#include "atom.h"

#include <string.h>

enum atom_op_kind { OP_NORM, OP_LINEAR, OP_ROPE_AND_CACHE, OP_ATTENTION, OP_KEEP_ROWS };

typedef struct {
    const atom_weight *weight;
    const float *x;
    int64_t ldx;
    float *y;
    int64_t ldy;
} linear_op;

/* From here on only the rows that sample matter: they move to the front of both buffers. */
typedef struct {
    float *a, *b;
    int64_t size_a, size_b;
} keep_rows_op;

typedef struct {
    int32_t kind;
    int32_t group;    /* cache group of rope and attention */
    int32_t rotation; /* of rope */
    int32_t reserved;
    union {
        atom_norm_args norm;
        linear_op linear;
        atom_rope_args rope;
        atom_attention_args attention;
        keep_rows_op keep_rows;
    } u;
} atom_op;

typedef struct {
    const float *inv_freq; /* [half] */
    float *cos, *sin;      /* [tokens, half] */
    int32_t half;
    float factor;
} atom_program_rotation;

typedef struct {
    const atom_op *ops;
    int64_t num_ops;
    const atom_program_rotation *rotations;
    int64_t num_rotations;
    const atom_weight *embedding, *head;
    float *x;      /* [tokens, size]: the residual, what the embedding writes */
    float *hidden; /* [tokens, size]: what the final norm writes */
    float *picked; /* [rows, size]: the head's input where it is not the front of hidden */
    int64_t size;
    float embed_scale;
} atom_program;

typedef struct {
    const int32_t *block_tables;
    int64_t table_stride;
    const int64_t *slots;
} atom_step_group;

typedef struct {
    int64_t num_tokens, num_seqs;
    const int64_t *ids, *positions; /* [num_tokens] */
    const int32_t *cu_seqlens_q;    /* [num_seqs + 1] */
    const int32_t *context_lens;    /* [num_seqs] */
    const atom_step_group *groups;
    const int64_t *rows; /* [num_rows] tokens that sample, ascending */
    int64_t num_rows;
    int64_t keeps_all; /* hidden states of all tokens are wanted; otherwise only those of rows, in front */
    int64_t *best_ids; /* [num_rows] the best id below num_valid of each row, and its logit; NULL: not wanted */
    float *best;
    int64_t num_valid;
    float *logits; /* [num_rows, ld_logits] or NULL */
    int64_t ld_logits;
} atom_step;

typedef struct {
    const atom_program *program;
    const atom_step *step;
} atom_program_call;

static void copy_rows(float *to, const float *from, int64_t size, const int64_t *rows, int64_t num_rows)
{
    for (int64_t i = 0; i < num_rows; i++)
        if (to + i * size != from + rows[i] * size)
            memmove(to + i * size, from + rows[i] * size, (size_t)size * sizeof(float));
}

/* Runs op on m rows; returns how many rows the next operation has. */
static int64_t run_op(atom_worker *w, const atom_program *program, const atom_op *op, const atom_step *step, int64_t m)
{
    const atom_step_group *group = &step->groups[op->group];
    switch (op->kind) {
    case OP_NORM: {
        atom_norm_args norm = op->u.norm;
        norm.m = m;
        atom_add_rms_norm(w, &norm);
        break;
    }
    case OP_LINEAR: {
        const linear_op *linear = &op->u.linear;
        atom_linear(w, linear->weight, linear->x, linear->ldx, linear->y, linear->ldy, m);
        break;
    }
    case OP_ROPE_AND_CACHE: {
        atom_rope_args rope = op->u.rope;
        rope.cos = program->rotations[op->rotation].cos;
        rope.sin = program->rotations[op->rotation].sin;
        rope.slots = group->slots;
        rope.m = m;
        atom_rope_and_cache(w, &rope);
        break;
    }
    case OP_ATTENTION: {
        atom_attention_args attention = op->u.attention;
        attention.block_tables = group->block_tables;
        attention.table_stride = group->table_stride;
        attention.cu_seqlens_q = step->cu_seqlens_q;
        attention.context_lens = step->context_lens;
        attention.num_seqs = step->num_seqs;
        attention.num_tokens = m;
        atom_attention(w, &attention);
        break;
    }
    case OP_KEEP_ROWS: {
        const keep_rows_op *keep = &op->u.keep_rows;
        if (step->keeps_all || step->num_rows == m)
            break;
        if (w->id == 0) {
            copy_rows(keep->a, keep->a, keep->size_a, step->rows, step->num_rows);
            copy_rows(keep->b, keep->b, keep->size_b, step->rows, step->num_rows);
        }
        atom_barrier(w);
        return step->num_rows;
    }
    }
    return m;
}

void atom_program_step(atom_worker *w, const void *arguments)
{
    const atom_program_call *call = arguments;
    const atom_program *program = call->program;
    const atom_step *step = call->step;
    int64_t m = step->num_tokens;

    atom_gather_rows(w, program->embedding, step->ids, m, program->embed_scale, program->x, program->size);
    for (int64_t i = 0; i < program->num_rotations; i++) {
        const atom_program_rotation *r = &program->rotations[i];
        atom_rotation(w, step->positions, m, r->inv_freq, r->half, r->factor, r->cos, r->sin);
    }
    for (int64_t i = 0; i < program->num_ops && m > 0; i++)
        m = run_op(w, program, &program->ops[i], step, m);

    if (step->num_rows == 0)
        return;
    const float *x = program->hidden;
    if (step->num_rows != m) {
        if (w->id == 0)
            copy_rows(program->picked, program->hidden, program->size, step->rows, step->num_rows);
        atom_barrier(w);
        x = program->picked;
    }
    if (step->logits)
        atom_linear(w, program->head, x, program->size, step->logits, step->ld_logits, step->num_rows);
    else if (step->best_ids)
        atom_linear_argmax(w, program->head, x, program->size, step->num_rows, step->num_valid, step->best_ids, step->best);
}
