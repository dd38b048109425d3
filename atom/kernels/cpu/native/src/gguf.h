/* GGUF blocks regrouped into panels of 64 columns, and what multiplies them.
 *
 * A panel holds 64 rows of the checkpoint's weight (columns of the product) chunk by chunk along k; a chunk is one block
 * of each of its columns, 32 or 256 values of k, in as many bytes as the 64 blocks had:
 *
 *   Q4_0, Q5_0, Q8_0 (32):  64 fp16 d, then the quants
 *   Q4_K, Q5_K (256):       64 fp16 d, 64 fp16 dmin, 12 x 64 bytes of packed scales, then 8 groups of quants
 *   Q6_K (256):             64 fp16 d, 16 x 64 int8 scales, then 8 groups of quants
 *
 * The quants of a group of 32 are, for step s (values 4 s .. 4 s + 3 of the group) and column c:
 *
 *   bytes    [8 s][64 c][4]                q + 128
 *   nibbles  [4 s][64 c][4]                low: step s, high: step s + 4
 *   fifth    a bit each, [8 s][256]        behind the nibbles
 *   sixth    two bits each, [2][64 c][4]   behind the nibbles; byte h, bits 2 j: step 4 h + j
 *
 * All are unsigned, less an offset: sum (q - offset) a = sum q a - offset sum a, where a are the activations rounded to
 * int8 with one scale a group of 32. Any number of rows gives each row the same bits.
 */
#ifndef ATOM_GGUF_H
#define ATOM_GGUF_H

#include "atom.h"

#define GGUF_PANEL 64
#define GGUF_GROUP 32
#define GGUF_CHUNK 256 /* values of k that are unpacked at a time */
#define GGUF_INLINE static inline __attribute__((always_inline))

/* Where the parts of a chunk lie. */
typedef struct {
    int32_t format;
    int32_t block_k;      /* values of k in a block */
    int32_t block_bytes;  /* of a block in a GGUF file */
    int32_t group_bytes;  /* of 64 columns x 32 values, scales not counted */
    int32_t header_bytes; /* of a chunk, in front of its groups */
    int32_t offset;       /* what the stored quants are too large by */
    int32_t has_minima;
    int32_t scale_k;      /* values of k that share a scale */
    int32_t high_bits;    /* above the nibble; 4: bytes */
} gguf_layout;

/* NULL: not a GGUF format. */
const gguf_layout *gguf_layout_of(int32_t format);

/* Rows of activations in int8: values [rows, k], scales [rows, k / 32], sums [rows, k / 16] of the values. */
typedef struct {
    const int8_t *values;
    const float *scales;
    const int32_t *sums;
    int64_t rows, k;
} gguf_rows;

/* out [rows, 64] = the rows times one panel. work: GGUF_WORK bytes of the caller's, 64-byte aligned. */
#define GGUF_WORK (GGUF_CHUNK * GGUF_PANEL + 2 * 4 * 16 * GGUF_PANEL + 2 * 8 * GGUF_PANEL)
typedef void (*gguf_panel_fn)(const gguf_layout *layout, const uint8_t *panel, const gguf_rows *rows, float *out, char *work);
typedef void (*gguf_round_fn)(const float *x, int64_t k, int8_t *values, float *scales, int32_t *sums);

typedef struct {
    const char *name;
    int (*is_available)(void);
    gguf_panel_fn multiply;
    gguf_round_fn round;
} gguf_kernels;
extern const gguf_kernels gguf_avx512, gguf_avx2, gguf_plain;

GGUF_INLINE float gguf_half(uint16_t half)
{
    union { uint32_t bits; float value; } number;
    number.bits = (uint32_t)(half & 0x7fff) << 13;
    number.value *= 0x1p112f; /* moves the exponent, subnormals too */
    number.bits |= ((half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u) | (uint32_t)(half & 0x8000) << 16;
    return number.value;
}

/* Bytes of one chunk of a panel: block_k values of 64 columns. */
GGUF_INLINE int64_t gguf_chunk_bytes(const gguf_layout *layout)
{
    return (int64_t)layout->block_bytes * GGUF_PANEL;
}

GGUF_INLINE int64_t gguf_panel_bytes(const gguf_layout *layout, int64_t k)
{
    return k / layout->block_k * gguf_chunk_bytes(layout);
}

/* The quant of one column at place i (0..31) of a group. */
GGUF_INLINE int gguf_quant(const gguf_layout *layout, const uint8_t *group, int column, int i)
{
    const int step = i >> 2, byte = column * 4 + (i & 3);
    if (layout->high_bits == 4)
        return group[step * 256 + byte];
    int quant = group[(step & 3) * 256 + byte] >> (step < 4 ? 0 : 4) & 15;
    if (layout->high_bits == 1)
        quant |= (group[1024 + step * 32 + byte / 8] >> byte % 8 & 1) << 4;
    if (layout->high_bits == 2)
        quant |= (group[1024 + (step >> 2) * 256 + byte] >> 2 * (step & 3) & 3) << 4;
    return quant;
}

/* The factor and the subtrahend of one column's values k in a chunk: value = factor * (q - offset) - minimum. */
GGUF_INLINE void gguf_scale_at(const gguf_layout *layout, const uint8_t *chunk, int column, int k, float *factor, float *minimum)
{
    const uint16_t *halves = (const uint16_t *)chunk;
    const float d = gguf_half(halves[column]);
    *factor = d;
    *minimum = 0.0f;
    if (layout->has_minima) {
        const uint8_t *packed = chunk + 256 + column;
        const int g = k / 32;
        int scale, low;
        if (g < 4) {
            scale = packed[g * 64] & 63;
            low = packed[(g + 4) * 64] & 63;
        } else {
            scale = (packed[(g + 4) * 64] & 15) | packed[(g - 4) * 64] >> 6 << 4;
            low = packed[(g + 4) * 64] >> 4 | packed[g * 64] >> 6 << 4;
        }
        *factor = d * (float)scale;
        *minimum = gguf_half(halves[64 + column]) * (float)low;
    } else if (layout->scale_k == 16) {
        *factor = d * (float)((const int8_t *)chunk)[128 + k / 16 * 64 + column];
    }
}

#endif
