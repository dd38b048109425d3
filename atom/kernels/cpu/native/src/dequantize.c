/* GGUF blocks to rows of fp32 or bf16, bit by bit what ggml's formula gives in fp32: no fused multiply-add here. */
#include "atom.h"

#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif

#define PIECE 16384 /* values that a thread takes at a time */

enum ggml_type { Q4_0 = 2, Q5_0 = 6, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 }; /* ggml's numbers */

/* blocks [num_blocks] of ggml's type to out, fp32 or bf16, in their order. */
typedef struct {
    const uint8_t *blocks;
    void *out;
    int64_t num_blocks;
    int32_t type, out_is_bf16;
} atom_dequantize_args;

static float half_at(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023, bits;
    if (exponent == 31)
        bits = sign | 0x7f800000 | mantissa << 13;
    else if (exponent)
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else { /* zero or subnormal */
        float tiny = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &tiny, 4);
        bits |= sign;
    }
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void q4_0(const uint8_t *b, float *out)
{
    float d = half_at(b);
    for (int i = 0; i < 16; i++) {
        out[i] = (float)((b[2 + i] & 15) - 8) * d;
        out[i + 16] = (float)((b[2 + i] >> 4) - 8) * d;
    }
}

static void q5_0(const uint8_t *b, float *out)
{
    float d = half_at(b);
    uint32_t bits;
    memcpy(&bits, b + 2, 4);
    for (int i = 0; i < 16; i++) {
        out[i] = (float)((int32_t)((b[6 + i] & 15) | (bits >> i & 1) << 4) - 16) * d;
        out[i + 16] = (float)((int32_t)(b[6 + i] >> 4 | (bits >> (i + 16) & 1) << 4) - 16) * d;
    }
}

static void q8_0(const uint8_t *b, float *out)
{
    float d = half_at(b);
    for (int i = 0; i < 32; i++) out[i] = (float)(int8_t)b[2 + i] * d;
}

/* Q4_K, and Q5_K with its fifth bits: scale * q - minimum over groups of 32. */
static void k_affine(const uint8_t *b, const uint8_t *low, const uint8_t *high, float *out)
{
    const uint8_t *s = b + 4;
    float d = half_at(b), d_min = half_at(b + 2);
    for (int g = 0; g < 8; g++) {
        int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        int minimum = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
        float ds = d * (float)scale, dm = d_min * (float)minimum;
        const uint8_t *q = low + g / 2 * 32;
        for (int i = 0; i < 32; i++) {
            int value = g % 2 ? q[i] >> 4 : q[i] & 15;
            if (high) value |= (high[i] >> g & 1) << 4;
            out[g * 32 + i] = (float)value * ds - dm;
        }
    }
}

static void q6_k(const uint8_t *b, float *out)
{
    float d = half_at(b + 208);
    for (int h = 0; h < 2; h++)
        for (int g = 0; g < 4; g++) {
            const uint8_t *low = b + h * 64 + g % 2 * 32, *high = b + 128 + h * 32;
            float *to = out + h * 128 + g * 32;
            for (int part = 0; part < 2; part++) {
                float scale = d * (float)(int8_t)b[192 + h * 8 + g * 2 + part];
                for (int i = part * 16; i < part * 16 + 16; i++) {
                    int value = (g < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * g & 3) << 4;
                    to[i] = (float)(value - 32) * scale;
                }
            }
        }
}

static void store_bf16(bf16 *out, const float *values, int count)
{
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        out[i] = (bf16)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

void atom_dequantize(atom_worker *w, const atom_dequantize_args *a)
{
    const int size = a->type == Q4_K ? 144 : a->type == Q5_K ? 176 : a->type == Q6_K ? 210 : a->type == Q4_0 ? 18 : a->type == Q5_0 ? 22 : 34;
    const int count = a->type >= Q4_K ? 256 : 32;
    const int64_t per_piece = PIECE / count;
    for (int64_t first; (first = atom_next(w) * per_piece) < a->num_blocks;) {
        const int64_t last = first + per_piece < a->num_blocks ? first + per_piece : a->num_blocks;
        for (int64_t i = first; i < last; i++) {
            const uint8_t *b = a->blocks + i * size;
            float values[256], *to = a->out_is_bf16 ? values : (float *)a->out + i * count;
            switch (a->type) {
            case Q4_0: q4_0(b, to); break;
            case Q5_0: q5_0(b, to); break;
            case Q8_0: q8_0(b, to); break;
            case Q4_K: k_affine(b, b + 16, NULL, to); break;
            case Q5_K: k_affine(b, b + 48, b + 16, to); break;
            default: q6_k(b, to);
            }
            if (a->out_is_bf16) store_bf16((bf16 *)a->out + i * count, values, count);
        }
    }
    atom_barrier(w);
}
