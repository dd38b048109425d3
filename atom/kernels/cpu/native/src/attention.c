/* Hands out attention: tiles of query rows of long sequences, the longest first, then single tokens by kv head; the keys of a
 * token are split over the threads where tokens are few, and what the parts found is put together behind a barrier.
 *
 * A token's keys are always taken in spans at absolute positions, whose results are merged in order: whoever does that, the
 * bits are the same.
 */
#include "attention.h"

#define MAX_DECODE_QUERIES 8 /* a step that verifies drafts: more tokens of a sequence at once are a prefill */
#define SPAN 256
#define MAX_SPANS 64
#define MIN_SPLIT 512 /* keys of a part: about 20 us */

typedef struct {
    const atom_attention_args *a;
    int64_t group, tile_rows, part_keys; /* keys that one part should have */
} plan;

static int is_prefill(const atom_attention_args *a, int64_t seq) {
    int64_t queries = a->cu_seqlens_q[seq + 1] - a->cu_seqlens_q[seq], group = a->num_heads / a->num_kv_heads;
    return a->context_lens[seq] > 0 && queries > (!a->is_uniform ? MAX_DECODE_QUERIES : group <= UNIFORM_HEADS ? 1 : 0);
}

/* ---- single tokens ---- */

typedef struct {
    int64_t seq, token;       /* row of q */
    int64_t low, high;        /* positions that it sees */
    int64_t span, num_spans;  /* keys of a span; spans that [low, high) touches */
    int64_t num_parts, spans_of_part;
    int64_t record;           /* of its first span's result in the shared memory; -1: one part, nothing is shared */
} decode_token;

static int64_t record_floats(const plan *p) { return p->group * (p->a->head_dim + 16); } /* keeps rows aligned */

static decode_state state_at(const plan *p, float *memory) {
    return (decode_state){memory, memory + 8 * p->group, memory + 16 * p->group};
}

/* The next token behind *t (start with token -1), in the same order for all threads; 0: there is none. */
static int next_token(const plan *p, decode_token *t, int64_t *seq_end, int64_t *records) {
    const atom_attention_args *a = p->a;
    t->token++;
    while (t->token >= *seq_end) {
        if (++t->seq >= a->num_seqs)
            return 0;
        t->token = a->cu_seqlens_q[t->seq];
        *seq_end = is_prefill(a, t->seq) || a->context_lens[t->seq] <= 0 ? t->token : a->cu_seqlens_q[t->seq + 1];
    }
    t->high = a->context_lens[t->seq] - (a->cu_seqlens_q[t->seq + 1] - 1 - t->token);
    t->low = a->window ? max64(0, t->high - a->window) : 0;
    if (a->is_uniform)
        t->span = UNIFORM_SPAN;
    else
        for (t->span = SPAN; t->span * MAX_SPANS < t->high - t->low;)
            t->span *= 2;
    t->num_spans = ceil_div(t->high, t->span) - t->low / t->span;
    t->spans_of_part = max64(1, p->part_keys / t->span);
    t->num_parts = ceil_div(t->num_spans, t->spans_of_part);
    t->record = -1;
    if (t->num_parts > 1) {
        int64_t wanted = t->num_spans * a->num_kv_heads;
        if ((*records + wanted) * record_floats(p) * (int64_t)sizeof(float) <= ATOM_SHARED) {
            t->record = *records;
            *records += wanted;
        } else {
            t->num_parts = 1;
            t->spans_of_part = t->num_spans;
        }
    }
    return 1;
}

static void decode_part(const plan *p, atom_worker *w, const decode_token *t, int64_t kv_head, int64_t part) {
    const atom_attention_args *a = p->a;
    int64_t width = p->group * a->head_dim;
    float *query = (float *)(w->scratch + (a->is_uniform ? UNIFORM_SCRATCH : DECODE_SCRATCH)), *memory = query + width;
    decode_state whole = state_at(p, memory), one = state_at(p, memory + record_floats(p));
    if (!a->is_uniform)
        atom_decode_query(a, a->q + t->token * a->ldq + kv_head * width, query);
    const int32_t *table = a->block_tables + t->seq * a->table_stride;
    int64_t first = part * t->spans_of_part, end = min64(t->num_spans, first + t->spans_of_part);
    for (int64_t i = first; i < end; i++) {
        int64_t start = (t->low / t->span + i) * t->span;
        decode_state *state = i == first ? &whole : &one, record;
        if (t->record >= 0) {
            record = state_at(p, (float *)atom_shared(w) + (t->record + kv_head * t->num_spans + i) * record_floats(p));
            state = &record;
        }
        int64_t low = max64(t->low, start), high = min64(t->high, start + t->span);
        if (a->is_uniform)
            atom_uniform_span(a, w->scratch, t->seq, kv_head, low, high, state);
        else
            atom_decode_span(a, w->scratch, query, table, kv_head, low, high, state);
        if (state == &one)
            atom_decode_merge(a, &whole, &one);
    }
    if (t->record < 0)
        atom_decode_finish(a, &whole, kv_head, a->out + t->token * a->ldo + kv_head * width);
}

/* Puts together what the parts of a token found. */
static void combine(const plan *p, atom_worker *w, const decode_token *t, int64_t kv_head) {
    const atom_attention_args *a = p->a;
    float *records = (float *)atom_shared(w) + (t->record + kv_head * t->num_spans) * record_floats(p);
    decode_state whole = state_at(p, records);
    for (int64_t i = 1; i < t->num_spans; i++) {
        decode_state one = state_at(p, records + i * record_floats(p));
        atom_decode_merge(a, &whole, &one);
    }
    atom_decode_finish(a, &whole, kv_head, a->out + t->token * a->ldo + kv_head * p->group * a->head_dim);
}

/* ---- the whole ---- */

static int64_t num_tiles(const plan *p, int64_t seq) {
    int64_t queries = p->a->cu_seqlens_q[seq + 1] - p->a->cu_seqlens_q[seq];
    return is_prefill(p->a, seq) ? ceil_div(queries * p->group, p->tile_rows) : 0;
}

static void prefill_tile(const plan *p, atom_worker *w, int64_t seq, int64_t piece) {
    const atom_attention_args *a = p->a;
    int64_t rows = (a->cu_seqlens_q[seq + 1] - a->cu_seqlens_q[seq]) * p->group;
    int64_t row = (num_tiles(p, seq) - 1 - piece / a->num_kv_heads) * p->tile_rows; /* the last rows see the most keys */
    atom_prefill_rows(a, w->scratch, seq, piece % a->num_kv_heads, row, min64(p->tile_rows, rows - row));
}

static void zero_rows(const atom_attention_args *a, int64_t first, int64_t end) {
    for (int64_t token = first; token < end; token++)
        memset(a->out + token * a->ldo, 0, sizeof(float) * a->num_heads * a->head_dim);
}

static plan make_plan(const atom_worker *w, const atom_attention_args *a) {
    plan p = {a, a->num_heads / a->num_kv_heads, PREFILL_ROWS, 0};
    int64_t tiles = 0, keys = 0;
    for (int64_t seq = 0; seq < a->num_seqs; seq++) {
        tiles += num_tiles(&p, seq) * a->num_kv_heads;
        if (!is_prefill(a, seq))
            keys += (a->cu_seqlens_q[seq + 1] - a->cu_seqlens_q[seq]) *
                    (a->window ? min64(a->window, a->context_lens[seq]) : a->context_lens[seq]);
    }
    if (tiles < 4 * w->num_threads)
        p.tile_rows = PREFILL_ROWS / 2;
    p.part_keys = w->num_threads == 1 ? INT64_MAX : max64(MIN_SPLIT, keys * a->num_kv_heads / (4 * w->num_threads));
    return p;
}

void atom_attention(atom_worker *w, const atom_attention_args *a) {
    plan p = make_plan(w, a);
    int64_t piece = atom_next(w), first = 0;
    for (int64_t seq = 0; seq < a->num_seqs; seq++) {
        int64_t count = num_tiles(&p, seq) * a->num_kv_heads;
        for (; piece < first + count; piece = atom_next(w))
            prefill_tile(&p, w, seq, piece - first);
        first += count;
    }
    decode_token t = {.seq = -1, .token = -1};
    int64_t seq_end = 0, num_records = 0;
    while (next_token(&p, &t, &seq_end, &num_records)) {
        int64_t count = t.num_parts * a->num_kv_heads;
        for (; piece < first + count; piece = atom_next(w))
            decode_part(&p, w, &t, (piece - first) / t.num_parts, (piece - first) % t.num_parts);
        first += count;
    }
    if (w->id == 0) {
        for (int64_t seq = 0; seq < a->num_seqs; seq++)
            if (a->context_lens[seq] <= 0)
                zero_rows(a, a->cu_seqlens_q[seq], a->cu_seqlens_q[seq + 1]);
        zero_rows(a, a->cu_seqlens_q[a->num_seqs], a->num_tokens);
    }
    atom_barrier(w);
    if (num_records == 0) /* the same for all threads */
        return;
    t = (decode_token){.seq = -1, .token = -1};
    seq_end = num_records = first = 0;
    piece = atom_next(w);
    while (next_token(&p, &t, &seq_end, &num_records)) {
        int64_t count = t.record >= 0 ? a->num_kv_heads : 0;
        for (; piece < first + count; piece = atom_next(w))
            combine(&p, w, &t, piece - first);
        first += count;
    }
    atom_barrier(w);
}
