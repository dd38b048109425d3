/* Products with GGUF panels in AVX2, and in plain C that compilers vectorise (NEON and anything else). */
#include <string.h>

#include "gguf.h"

/* 256 values of k at a time are unpacked to work, then each row passes over them. */
#define MULTIPLY_BODY                                                                                                       \
    uint8_t *quants = (uint8_t *)work;                                                                                      \
    float *factors = (float *)(work + GGUF_CHUNK * GGUF_PANEL), *minima = factors + 16 * GGUF_PANEL;                        \
    const int64_t k = rows->k;                                                                                              \
    memset(out, 0, rows->rows * GGUF_PANEL * sizeof *out);                                                                  \
    for (int64_t at = 0; at < k; at += GGUF_CHUNK) {                                                                        \
        const int num_groups = (k - at < GGUF_CHUNK ? k - at : GGUF_CHUNK) / GGUF_GROUP;                                    \
        for (int g = 0; g < num_groups;) {                                                                                  \
            unpack_scales(layout, panel, factors + (layout->block_k == GGUF_GROUP ? g * 64 : 0), minima);                   \
            panel += layout->header_bytes;                                                                                  \
            for (int end = g + layout->block_k / GGUF_GROUP; g < end; g++, panel += layout->group_bytes) {                  \
                if (layout->high_bits == 4)                                                                                 \
                    memcpy(quants + g * 2048, panel, 2048);                                                                 \
                else                                                                                                        \
                    unpack_quants(layout, panel, quants + g * 2048);                                                        \
            }                                                                                                               \
        }                                                                                                                   \
        for (int64_t i = 0; i < rows->rows; i++)                                                                            \
            for (int g = 0; g < num_groups; g++)                                                                            \
                group_times_row(layout, quants + g * 2048, factors + g * (32 / layout->scale_k) * 64, minima + g * 64,      \
                                rows->values + i * k + at + g * 32, rows->scales[i * (k / 32) + at / 32 + g],               \
                                rows->sums + i * (k / 16) + at / 16 + g * 2, out + i * 64);                                 \
    }

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#include <immintrin.h>

#define unpack_scales unpack_scales_avx2
#define unpack_quants unpack_quants_avx2
#define round_row round_row_avx2
#include "gguf_generic.h"

/* Products of 4 values of k for 8 columns. Bytes above 127 would overflow the 16 bits of maddubs: they are widened. */
GGUF_INLINE __m256i four_products(int is_wide, __m256i sum, __m256i weights, __m256i values)
{
    const __m256i ones = _mm256_set1_epi16(1);
    if (!is_wide)
        return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, values), ones));
    const __m256i even = _mm256_set1_epi16(255);
    const __m256i w_even = _mm256_and_si256(weights, even), w_odd = _mm256_srli_epi16(weights, 8);
    const __m256i a_even = _mm256_srai_epi16(_mm256_slli_epi16(values, 8), 8), a_odd = _mm256_srai_epi16(values, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w_even, a_even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(w_odd, a_odd));
}

GGUF_INLINE void part_times_row(int is_wide, const uint8_t *quants, int steps, const int8_t *a, int32_t start,
                                const float *factors, float a_scale, float *out)
{
    __m256i product[8];
    for (int r = 0; r < 8; r++)
        product[r] = _mm256_set1_epi32(start);
    for (int s = 0; s < steps; s++) {
        int32_t word;
        memcpy(&word, a + 4 * s, 4);
        for (int r = 0; r < 8; r++)
            product[r] = four_products(is_wide, product[r],
                                       _mm256_loadu_si256((const __m256i *)(quants + s * 256 + r * 32)),
                                       _mm256_set1_epi32(word));
    }
    for (int r = 0; r < 8; r++) {
        const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(product[r]), _mm256_set1_ps(a_scale));
        _mm256_storeu_ps(out + r * 8, _mm256_fmadd_ps(value, _mm256_loadu_ps(factors + r * 8), _mm256_loadu_ps(out + r * 8)));
    }
}

GGUF_INLINE void group_times_row(const gguf_layout *layout, const uint8_t *quants, const float *factors, const float *minima,
                                 const int8_t *a, float a_scale, const int32_t *sums, float *out)
{
    const int offset = layout->offset;
    if (layout->scale_k == 16) {
        part_times_row(0, quants, 4, a, -offset * sums[0], factors, a_scale, out);
        part_times_row(0, quants + 1024, 4, a + 16, -offset * sums[1], factors + 64, a_scale, out);
    } else if (layout->high_bits == 4) {
        part_times_row(1, quants, 8, a, -offset * (sums[0] + sums[1]), factors, a_scale, out);
    } else {
        part_times_row(0, quants, 8, a, -offset * (sums[0] + sums[1]), factors, a_scale, out);
    }
    if (layout->has_minima) {
        const __m256 weight = _mm256_set1_ps(a_scale * (float)(sums[0] + sums[1]));
        for (int c = 0; c < 64; c += 8)
            _mm256_storeu_ps(out + c, _mm256_fnmadd_ps(_mm256_loadu_ps(minima + c), weight, _mm256_loadu_ps(out + c)));
    }
}

static void multiply_avx2(const gguf_layout *layout, const uint8_t *panel, const gguf_rows *rows, float *out, char *work)
{
    MULTIPLY_BODY
}

static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
const gguf_kernels gguf_avx2 = {"avx2", has_avx2, multiply_avx2, round_row_avx2};

#undef unpack_scales
#undef unpack_quants
#undef round_row
#pragma GCC pop_options
#else
static int has_avx2(void) { return 0; }
const gguf_kernels gguf_avx2 = {"avx2", has_avx2, 0, 0};
#endif

#define group_times_row group_times_row_plain
#include "gguf_generic.h"

GGUF_INLINE void group_times_row(const gguf_layout *layout, const uint8_t *quants, const float *factors, const float *minima,
                                 const int8_t *a, float a_scale, const int32_t *sums, float *out)
{
    const int steps = layout->scale_k / 4;
    for (int part = 0; part < 8 / steps; part++) {
        int32_t product[64];
        const int32_t sum = steps == 4 ? sums[part] : sums[0] + sums[1];
        for (int c = 0; c < 64; c++)
            product[c] = -layout->offset * sum;
        for (int s = part * steps; s < (part + 1) * steps; s++)
            for (int c = 0; c < 64; c++)
                for (int j = 0; j < 4; j++)
                    product[c] += quants[s * 256 + c * 4 + j] * a[s * 4 + j];
        for (int c = 0; c < 64; c++)
            out[c] += (float)product[c] * a_scale * factors[part * 64 + c];
    }
    if (layout->has_minima) {
        const float weight = a_scale * (float)(sums[0] + sums[1]);
        for (int c = 0; c < 64; c++)
            out[c] -= minima[c] * weight;
    }
}

static void multiply_plain(const gguf_layout *layout, const uint8_t *panel, const gguf_rows *rows, float *out, char *work)
{
    MULTIPLY_BODY
}

static int always(void) { return 1; }
const gguf_kernels gguf_plain = {"plain", always, multiply_plain, round_row};
