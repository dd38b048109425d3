/* One id a row from logits: arg-max, or temperature with top-k, top-p and min-p, without sorting the vocabulary.
 *
 * The largest logit of each block of 64 comes first; the k-th largest of these bounds the k-th largest logit from below, so the
 * few blocks above it hold every candidate. Candidates are all ids at or above the bound, so ties stay whole, in order of
 * ids. Where they turn out too few for top-p the bound falls, in the end to the whole row. Only values are sorted.
 */
#include "simd.h"

#include <math.h>

#define BLOCK 64
#define SLACK 1e-6 /* top-p leaves out the last token if those before it miss the bound only by rounding */

/* ---- arg-max ---- */

void atom_argmax_rows(atom_worker *w, const atom_argmax_args *a) {
    for (int64_t row; (row = atom_next(w)) < a->m;) {
        const float *x = a->x + row * a->ldx;
        vf largest[4];
        vi is_nan = {};
        for (int i = 0; i < 4; i++)
            largest[i] = v_set(-INFINITY);
        int64_t i = 0, id = 0;
        for (; i + 4 * LANES <= a->n; i += 4 * LANES)
            for (int j = 0; j < 4; j++) {
                vf value = v_load(x + i + j * LANES);
                largest[j] = v_max(largest[j], value);
                is_nan |= value != value;
            }
        float best = v_largest(v_max(v_max(largest[0], largest[1]), v_max(largest[2], largest[3])));
        int has_nan = v_any(is_nan);
        for (; i < a->n; i++) {
            best = x[i] > best ? x[i] : best;
            has_nan |= x[i] != x[i];
        }
        if (has_nan) /* counts as the best */
            while (x[id] == x[id])
                id++;
        else {
            vf wanted = v_set(best);
            while (id + LANES <= a->n && !v_any(v_load(x + id) == wanted))
                id += LANES;
            while (x[id] != best)
                id++;
        }
        a->ids[row] = id;
        a->values[row] = x[id];
    }
    atom_barrier(w);
}

/* ---- choice ---- */

typedef uint32_t key_type __attribute__((may_alias)); /* keys lie where the floats were */

static inline uint32_t to_key(float x) { /* unsigned order is descending order of floats */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x80000000 ? bits : ~bits & 0x7fffffff;
}
static inline float from_key(uint32_t key) {
    uint32_t bits = key & 0x80000000 ? key : ~key & 0x7fffffff;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* values [n] in descending order; other [n] is room. */
static void sort_descending(float *values, float *other, int64_t n) {
    if (n <= 48) {
        for (int64_t i = 1; i < n; i++) {
            float x = values[i];
            int64_t j = i;
            for (; j > 0 && values[j - 1] < x; j--)
                values[j] = values[j - 1];
            values[j] = x;
        }
        return;
    }
    key_type *from = (key_type *)values, *to = (key_type *)other;
    uint32_t counts[3][2048] = {};
    for (int64_t i = 0; i < n; i++) {
        uint32_t key = to_key(values[i]);
        from[i] = key;
        counts[0][key & 2047]++, counts[1][key >> 11 & 2047]++, counts[2][key >> 22]++;
    }
    for (int pass = 0; pass < 3; pass++) {
        uint32_t sum = 0, shift = 11 * pass;
        for (int i = 0; i < 2048; i++) {
            uint32_t count = counts[pass][i];
            counts[pass][i] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < n; i++)
            to[counts[pass][from[i] >> shift & 2047]++] = from[i];
        key_type *swap = from;
        from = to, to = swap;
    }
    for (int64_t i = 0; i < n; i++) /* three passes: the result is in `other` */
        values[i] = from_key(from[i]);
}

/* The k-th largest (k >= 1) of values [n], whose order is lost. */
static float kth_largest(float *values, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1, want = k - 1;
    while (low < high) {
        float a = values[low], b = values[(low + high) / 2], c = values[high];
        float pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
        int64_t i = low, j = high;
        while (i <= j) {
            while (i < high && values[i] > pivot)
                i++;
            while (j > low && values[j] < pivot)
                j--;
            if (i > j)
                break;
            float swap = values[i];
            values[i++] = values[j], values[j--] = swap;
        }
        if (want <= j)
            high = j;
        else if (want >= i)
            low = i;
        else
            break;
    }
    return values[want];
}

typedef struct {
    const float *logits;
    int64_t vocab, num_blocks, limit; /* limit: top-k, at most vocab */
    float best, scale, top_p, min_p, floor, uniform; /* scale: log2(e) / temperature; floor: nothing below has any weight */
    double total;                     /* weight of the whole row; 0: of what top-k keeps, to be summed there */
    float *largest, *room;            /* [num_blocks] */
    float *values, *sorted, *other;   /* candidates [vocab] */
    int32_t *ids;
} choice;

static float weight_of(const choice *c, float logit) { return v_exp2(v_set((logit - c->best) * c->scale))[0]; }

/* Overwrites x [n] by weights; n is rounded up to whole vectors. */
static void to_weights(const choice *c, float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES)
        v_store(x + i, v_exp2((v_load(x + i) - c->best) * c->scale));
}

/* The weight of ids start .. end. */
static double sum_weights(const choice *c, int64_t start, int64_t end) {
    double total = 0;
    int64_t i = start;
    while (i + LANES <= end) {
        vf sum = {};
        for (int64_t stop = min64(end, i + 512); i + LANES <= stop; i += LANES)
            sum += v_exp2((v_load(c->logits + i) - c->best) * c->scale);
        total += v_sum(sum);
    }
    for (; i < end; i++)
        total += weight_of(c, c->logits[i]);
    return total;
}

/* No filter: the block of 512 at which the sum passes the target, then the id in it. */
static int64_t choose_from_all(const choice *c) {
    int64_t num_parts = ceil_div(c->vocab, 512), part = 0, last = 0;
    double *sums = (double *)c->sorted, total = 0, before = 0;
    for (int64_t i = 0; i < num_parts; i++)
        total += sums[i] = sum_weights(c, i * 512, min64(c->vocab, (i + 1) * 512));
    double target = total * c->uniform;
    for (; part < num_parts - 1 && before + sums[part] <= target; part++)
        before += sums[part];
    for (int64_t i = part * 512; i < min64(c->vocab, (part + 1) * 512); i++) {
        double weight = weight_of(c, c->logits[i]);
        if (weight > 0)
            last = i; /* sums round differently: never past the last id that has any weight */
        before += weight;
        if (before > target)
            return i;
    }
    return last;
}

/* Candidates: every id at or above the bound. -1: more than a quarter of the blocks has one. */
static int64_t gather(const choice *c, float bound) {
    int64_t count = 0, num_wide = 0;
    for (int64_t block = 0; block < c->num_blocks; block++) {
        if (!(c->largest[block] >= bound))
            continue;
        if (++num_wide > c->num_blocks / 4)
            return -1;
        for (int64_t i = block * BLOCK; i < min64(c->vocab, (block + 1) * BLOCK); i++) {
            c->values[count] = c->logits[i];
            c->ids[count] = (int32_t)i;
            count += c->logits[i] >= bound;
        }
    }
    return count;
}

/* Chooses among candidates values [count] (ids NULL: the row itself); -1: ids below the bound could be kept as well. */
static int64_t choose_among(const choice *c, const float *values, const int32_t *ids, int64_t count, float bound) {
    memcpy(c->sorted, values, 4 * count);
    sort_descending(c->sorted, c->other, count);
    int64_t limit = min64(c->limit, count), kept = 0;
    memcpy(c->other, c->sorted, 4 * limit);
    to_weights(c, c->other, limit); /* room of sorted and other: a vector more than the vocabulary */
    double total = c->total, mass = 0;
    if (c->top_p < 1 && total == 0)
        for (int64_t i = 0; i < limit; i++)
            total += c->other[i];
    double share = ((double)c->top_p - SLACK) * total;
    for (; kept < limit; kept++) {
        if (kept > 0 && ((c->top_p < 1 && mass >= share) || c->other[kept] < c->min_p))
            break;
        mass += c->other[kept];
    }
    if (kept == count && kept < c->limit && bound > c->floor)
        return -1;
    if (kept == 0)
        return 0; /* a row that is not finite */
    float smallest = c->sorted[kept - 1];
    int64_t num_ties = 0;
    for (int64_t i = kept - 1; i >= 0 && c->sorted[i] == smallest; i--)
        num_ties++;
    memcpy(c->other, values, 4 * count);
    to_weights(c, c->other, count);
    double target = 0, sum = 0; /* the total in order of ids: what is passed must be reached */
    int64_t ties = num_ties, last = 0;
    for (int pass = 0; pass < 2; pass++) {
        ties = num_ties;
        for (int64_t i = 0; i < count; i++) {
            if (!(values[i] > smallest) && !(values[i] == smallest && ties-- > 0))
                continue;
            float weight = c->other[i];
            if (pass == 0) {
                target += weight;
                continue;
            }
            last = i;
            sum += weight;
            if (sum > target)
                return ids ? ids[i] : i;
        }
        target *= c->uniform;
    }
    return ids ? ids[last] : last;
}

static int64_t choose(choice *c) {
    int is_limited = c->limit < c->vocab, is_nucleus = c->top_p < 1;
    if (!is_limited && !is_nucleus && !(c->min_p > 0))
        return choose_from_all(c);
    for (int64_t block = 0; block < c->num_blocks; block++) {
        const float *x = c->logits + block * BLOCK;
        float largest = x[0];
        if ((block + 1) * BLOCK <= c->vocab) {
            vf v = v_load(x);
            for (int i = LANES; i < BLOCK; i += LANES)
                v = v_max(v, v_load(x + i));
            largest = v_largest(v);
        } else
            for (int64_t i = 1; block * BLOCK + i < c->vocab; i++)
                largest = x[i] > largest ? x[i] : largest;
        c->largest[block] = largest;
    }
    if (is_nucleus && !is_limited)
        c->total = sum_weights(c, 0, c->vocab);
    int64_t wanted = is_limited ? c->limit : is_nucleus ? max64(32, c->num_blocks / 64) : 0;
    for (;; wanted *= 8) {
        float bound = c->floor;
        if (wanted > 0) {
            if (wanted > c->num_blocks / 4)
                break;
            memcpy(c->room, c->largest, 4 * c->num_blocks);
            bound = fmaxf(bound, kth_largest(c->room, c->num_blocks, wanted));
        }
        int64_t count = gather(c, bound);
        if (count < 0)
            break;
        int64_t id = choose_among(c, c->values, c->ids, count, bound);
        if (id >= 0)
            return id;
    }
    return choose_among(c, c->logits, NULL, c->vocab, -INFINITY);
}

void atom_choose_rows(atom_worker *w, const atom_choose_args *a) {
    int64_t room = ceil_div(a->n, BLOCK) * BLOCK + BLOCK;
    float *memory = (float *)w->scratch;
    for (int64_t row; (row = atom_next(w)) < a->m;) {
        int64_t quarter = room / 4 + 2 * BLOCK;
        choice c = {
            .logits = a->x + row * a->ldx, .vocab = a->n, .num_blocks = ceil_div(a->n, BLOCK),
            .limit = a->top_k[row] < 1 ? a->n : min64(a->n, a->top_k[row]),
            .best = a->best[row], .scale = LOG2E / a->temperature[row],
            .top_p = a->top_p[row], .min_p = a->min_p[row], .uniform = a->uniforms[row],
            .sorted = memory, .other = memory + room, .values = memory + 2 * room, .ids = (int32_t *)(memory + 2 * room + quarter),
            .largest = memory + 2 * room + 2 * quarter, .room = memory + 2 * room + 2 * quarter + room / BLOCK,
        };
        /* 2^-126 is the smallest weight; the share of top-p is one of all that top-k keeps, whatever min-p leaves of it. */
        float lowest = -126.0f / LOG2E;
        if (c.min_p > 0 && !(c.limit < c.vocab && c.top_p < 1))
            lowest = fmaxf(lowest, logf(c.min_p) - 1e-3f);
        c.floor = c.best + a->temperature[row] * lowest;
        a->ids[row] = choose(&c);
    }
    atom_barrier(w);
}
