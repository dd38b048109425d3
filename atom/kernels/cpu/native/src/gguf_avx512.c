/* Products with GGUF panels on AVX-512 with VNNI: 16 columns x 4 values of k an instruction. */
#include <string.h>

#include "gguf.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")
#include <immintrin.h>

#include "gguf_generic.h"

#define MAX_ROWS 6 /* 24 accumulators, 4 weights, 1 broadcast: 29 of 32 registers */
#define PREFETCH 2048

GGUF_INLINE void prefetch(const uint8_t *at, int bytes)
{
    for (int i = 0; i < bytes; i += 64)
        _mm_prefetch((const char *)at + PREFETCH + i, _MM_HINT_T0);
}

/* Step s of 16 columns, one byte a value. high_bits is a constant where this is inlined. */
GGUF_INLINE __m512i weights(int high_bits, const uint8_t *group, int s, int r)
{
    if (high_bits == 4)
        return _mm512_loadu_si512(group + s * 256 + r * 64);
    const __m512i pair = _mm512_loadu_si512(group + (s & 3) * 256 + r * 64);
    __m512i quants = _mm512_and_si512(s < 4 ? pair : _mm512_srli_epi16(pair, 4), _mm512_set1_epi8(15));
    if (high_bits == 1) {
        __mmask64 fifth;
        memcpy(&fifth, group + 1024 + s * 32 + r * 8, 8);
        quants = _mm512_mask_add_epi8(quants, fifth, quants, _mm512_set1_epi8(16));
    }
    if (high_bits == 2) {
        __m512i sixth = _mm512_loadu_si512(group + 1024 + (s >> 2) * 256 + r * 64);
        if ((s & 3) < 2)
            sixth = _mm512_slli_epi16(sixth, 4 - 2 * (s & 3));
        else if ((s & 3) == 3)
            sixth = _mm512_srli_epi16(sixth, 2);
        quants = _mm512_ternarylogic_epi32(quants, sixth, _mm512_set1_epi8(0x30), 0xf8); /* a | (b & c) */
    }
    return quants;
}

GGUF_INLINE __m512 halves(const uint8_t *at, int r)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at + r * 32)));
}

GGUF_INLINE __m512i step_values(const int8_t *a, int s)
{
    int32_t word;
    memcpy(&word, a + 4 * s, 4);
    return _mm512_set1_epi32(word);
}

/* The twelve bytes of 64 columns to eight bytes of scales, eight of minima. */
GGUF_INLINE void unpack_k_scales(const uint8_t *packed, uint8_t *scales, uint8_t *minima)
{
    const __m512i six = _mm512_set1_epi8(63), four = _mm512_set1_epi8(15), top = _mm512_set1_epi8(0x30);
    for (int g = 0; g < 4; g++) {
        const __m512i scale = _mm512_loadu_si512(packed + g * 64), low = _mm512_loadu_si512(packed + (g + 4) * 64);
        const __m512i mixed = _mm512_loadu_si512(packed + (g + 8) * 64);
        _mm512_storeu_si512(scales + g * 64, _mm512_and_si512(scale, six));
        _mm512_storeu_si512(minima + g * 64, _mm512_and_si512(low, six));
        _mm512_storeu_si512(scales + (g + 4) * 64, _mm512_or_si512(_mm512_and_si512(mixed, four),
                                                                  _mm512_and_si512(_mm512_srli_epi16(scale, 2), top)));
        _mm512_storeu_si512(minima + (g + 4) * 64, _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(mixed, 4), four),
                                                                  _mm512_and_si512(_mm512_srli_epi16(low, 2), top)));
    }
}

GGUF_INLINE __m512 bytes_to_floats(const uint8_t *at)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)));
}

/* One row: quants go from the panel to the product without a stop in memory. */
GGUF_INLINE void one_row(const int high_bits, const int has_minima, const int scale_k, const int offset, const int block_k,
                         const int group_bytes, const int header_bytes, const uint8_t *chunk, const gguf_rows *rows,
                         float *out, char *work)
{
    const int8_t *a = rows->values;
    const float *a_scales = rows->scales;
    const int32_t *sums = rows->sums;
    uint8_t *scales = (uint8_t *)work, *minima = scales + 512;
    __m512 total[4];
    for (int r = 0; r < 4; r++)
        total[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < rows->k; k += block_k) {
        prefetch(chunk, header_bytes);
        __m512 d[4], dmin[4];
        for (int r = 0; r < 4; r++)
            d[r] = halves(chunk, r);
        if (has_minima) {
            unpack_k_scales(chunk + 256, scales, minima);
            for (int r = 0; r < 4; r++)
                dmin[r] = halves(chunk + 128, r);
        }
        const uint8_t *group = chunk + header_bytes;
        for (int g = 0; g < block_k / 32; g++) {
            prefetch(group, group_bytes);
            const __m512 a_scale = _mm512_set1_ps(*a_scales);
            for (int part = 0; part < 32 / scale_k; part++) {
                const int32_t sum = scale_k == 16 ? sums[part] : sums[0] + sums[1];
                __m512i product[4];
                for (int r = 0; r < 4; r++)
                    product[r] = _mm512_set1_epi32(-offset * sum);
                for (int s = part * scale_k / 4; s < (part + 1) * scale_k / 4; s++) {
                    const __m512i values = step_values(a, s);
                    for (int r = 0; r < 4; r++)
                        product[r] = _mm512_dpbusd_epi32(product[r], weights(high_bits, group, s, r), values);
                }
                for (int r = 0; r < 4; r++) {
                    __m512 factor = d[r];
                    if (has_minima)
                        factor = _mm512_mul_ps(factor, bytes_to_floats(scales + g * 64 + r * 16));
                    if (scale_k == 16)
                        factor = _mm512_mul_ps(factor, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(
                                                           (const __m128i *)(chunk + 128 + (g * 2 + part) * 64 + r * 16)))));
                    total[r] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(product[r]), a_scale), factor, total[r]);
                }
            }
            if (has_minima) {
                const __m512 weight = _mm512_set1_ps(*a_scales * (float)(sums[0] + sums[1]));
                for (int r = 0; r < 4; r++) {
                    const __m512 minimum = _mm512_mul_ps(dmin[r], bytes_to_floats(minima + g * 64 + r * 16));
                    total[r] = _mm512_fnmadd_ps(minimum, weight, total[r]);
                }
            }
            group += group_bytes;
            a += 32;
            a_scales++;
            sums += 2;
        }
        chunk = group;
    }
    for (int r = 0; r < 4; r++)
        _mm512_storeu_ps(out + r * 16, total[r]);
}

/* The numbers are those of the layouts in gguf_pack.c, as constants. */
#define ONE_ROW(name, ...)                                                                                           \
    static __attribute__((noinline)) void gguf_one_##name(const uint8_t *panel, const gguf_rows *rows, float *out, char *work) \
    {                                                                                                                \
        one_row(__VA_ARGS__, panel, rows, out, work);                                                                \
    }
ONE_ROW(q4_0, 0, 0, 32, 8, 32, 1024, 128)
ONE_ROW(q5_0, 1, 0, 32, 16, 32, 1280, 128)
ONE_ROW(q8_0, 4, 0, 32, 128, 32, 2048, 128)
ONE_ROW(q4_k, 0, 1, 32, 0, 256, 1024, 1024)
ONE_ROW(q5_k, 1, 1, 32, 0, 256, 1280, 1024)
ONE_ROW(q6_k, 2, 0, 16, 32, 256, 1536, 1152)

/* Integer products of some rows with the steps of one scale: product [rows, 64]. Accumulators have names, not indices:
 * gcc keeps an array of them in memory. */
typedef void (*rows_fn)(const uint8_t *quants, int steps, const int8_t *a, int64_t k, int32_t *product);
#define LIST_1(X) X(0)
#define LIST_2(X) LIST_1(X) X(1)
#define LIST_3(X) LIST_2(X) X(2)
#define LIST_4(X) LIST_3(X) X(3)
#define LIST_5(X) LIST_4(X) X(4)
#define LIST_6(X) LIST_5(X) X(5)
#define CLEAR(i) __m512i p##i##0 = zero, p##i##1 = zero, p##i##2 = zero, p##i##3 = zero;
#define ADD(i)                                             \
    {                                                      \
        const __m512i values = step_values(a + i * k, s);  \
        p##i##0 = _mm512_dpbusd_epi32(p##i##0, w0, values); \
        p##i##1 = _mm512_dpbusd_epi32(p##i##1, w1, values); \
        p##i##2 = _mm512_dpbusd_epi32(p##i##2, w2, values); \
        p##i##3 = _mm512_dpbusd_epi32(p##i##3, w3, values); \
    }
#define KEEP(i)                                       \
    _mm512_store_si512(product + i * 64, p##i##0);      \
    _mm512_store_si512(product + i * 64 + 16, p##i##1); \
    _mm512_store_si512(product + i * 64 + 32, p##i##2); \
    _mm512_store_si512(product + i * 64 + 48, p##i##3);
#define ROWS(n)                                                                                              \
    static void gguf_times_##n(const uint8_t *quants, int steps, const int8_t *a, int64_t k, int32_t *product)       \
    {                                                                                                          \
        const __m512i zero = _mm512_setzero_si512();                                                           \
        LIST_##n(CLEAR)                                                                                        \
        for (int s = 0; s < steps; s++) {                                                                      \
            const __m512i w0 = _mm512_load_si512(quants + s * 256), w1 = _mm512_load_si512(quants + s * 256 + 64); \
            const __m512i w2 = _mm512_load_si512(quants + s * 256 + 128);                                      \
            const __m512i w3 = _mm512_load_si512(quants + s * 256 + 192);                                      \
            LIST_##n(ADD)                                                                                      \
        }                                                                                                      \
        LIST_##n(KEEP)                                                                                         \
    }
ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
static const rows_fn rows_by_count[] = {0, gguf_times_1, gguf_times_2, gguf_times_3, gguf_times_4, gguf_times_5, gguf_times_6};

/* Rows times the unpacked groups; adds to out [num_rows, 64]. */
static void some_rows(int num_rows, const gguf_layout *layout, const uint8_t *quants, const float *factors,
                      const float *minima, int num_groups, const gguf_rows *rows, int64_t first, int64_t at, float *out)
{
    const int64_t k = rows->k;
    const int parts = 32 / layout->scale_k;
    int32_t product[MAX_ROWS * 64] __attribute__((aligned(64)));
    for (int g = 0; g < num_groups; g++)
        for (int part = 0; part < parts; part++) {
            const int8_t *a = rows->values + first * k + at + g * 32 + part * 16;
            rows_by_count[num_rows](quants + g * 2048 + part * 1024, 8 / parts, a, k, product);
            for (int i = 0; i < num_rows; i++) {
                const int32_t *sums = rows->sums + (first + i) * (k / 16) + at / 16 + g * 2;
                const int32_t sum = parts == 2 ? sums[part] : sums[0] + sums[1];
                const float scale = rows->scales[(first + i) * (k / 32) + at / 32 + g];
                const __m512 a_scale = _mm512_set1_ps(scale), weight = _mm512_set1_ps(scale * (float)sum);
                const __m512i offset = _mm512_set1_epi32(layout->offset * sum);
                for (int r = 0; r < 64; r += 16) {
                    const __m512i exact = _mm512_sub_epi32(_mm512_load_si512(product + i * 64 + r), offset);
                    const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), a_scale);
                    __m512 total = _mm512_fmadd_ps(value, _mm512_load_ps(factors + (g * parts + part) * 64 + r),
                                                   _mm512_loadu_ps(out + i * 64 + r));
                    if (layout->has_minima)
                        total = _mm512_fnmadd_ps(_mm512_load_ps(minima + g * 64 + r), weight, total);
                    _mm512_storeu_ps(out + i * 64 + r, total);
                }
            }
        }
}

GGUF_INLINE void expand(int high_bits, const uint8_t *group, uint8_t *quants)
{
    for (int s = 0; s < 8; s++)
        for (int r = 0; r < 4; r++)
            _mm512_store_si512(quants + s * 256 + r * 64, weights(high_bits, group, s, r));
}

static void expand_group(const gguf_layout *layout, const uint8_t *group, uint8_t *quants)
{
    switch (layout->high_bits) {
    case 0: expand(0, group, quants); break;
    case 1: expand(1, group, quants); break;
    case 2: expand(2, group, quants); break;
    default: expand(4, group, quants);
    }
}

/* 256 values of k at a time are unpacked to work (L1), then all rows pass over them. */
static void many_rows(const gguf_layout *layout, const uint8_t *panel, const gguf_rows *rows, float *out, char *work)
{
    uint8_t *quants = (uint8_t *)work;
    float *factors = (float *)(work + GGUF_CHUNK * GGUF_PANEL), *minima = factors + 16 * GGUF_PANEL;
    const int64_t k = rows->k;
    memset(out, 0, rows->rows * GGUF_PANEL * sizeof *out);
    for (int64_t at = 0; at < k; at += GGUF_CHUNK) {
        const int num_groups = (k - at < GGUF_CHUNK ? k - at : GGUF_CHUNK) / GGUF_GROUP;
        for (int g = 0; g < num_groups;) {
            prefetch(panel, layout->header_bytes);
            if (layout->block_k == GGUF_GROUP)
                for (int r = 0; r < 4; r++)
                    _mm512_store_ps(factors + g * 64 + r * 16, halves(panel, r));
            else
                unpack_scales(layout, panel, factors, minima);
            panel += layout->header_bytes;
            for (int end = g + layout->block_k / GGUF_GROUP; g < end; g++, panel += layout->group_bytes) {
                prefetch(panel, layout->group_bytes);
                expand_group(layout, panel, quants + g * 2048);
            }
        }
        for (int64_t i = 0; i < rows->rows;) {
            const int64_t left = rows->rows - i;
            const int count = left <= MAX_ROWS ? left : left < 2 * MAX_ROWS ? (left + 1) / 2 : MAX_ROWS;
            some_rows(count, layout, quants, factors, minima, num_groups, rows, i, at, out + i * GGUF_PANEL);
            i += count;
        }
    }
}

static void multiply(const gguf_layout *layout, const uint8_t *panel, const gguf_rows *rows, float *out, char *work)
{
    if (rows->rows > 1) {
        many_rows(layout, panel, rows, out, work);
        return;
    }
    switch (layout->format) {
    case ATOM_Q4_0: gguf_one_q4_0(panel, rows, out, work); break;
    case ATOM_Q5_0: gguf_one_q5_0(panel, rows, out, work); break;
    case ATOM_Q8_0: gguf_one_q8_0(panel, rows, out, work); break;
    case ATOM_Q4_K: gguf_one_q4_k(panel, rows, out, work); break;
    case ATOM_Q5_K: gguf_one_q5_k(panel, rows, out, work); break;
    case ATOM_Q6_K: gguf_one_q6_k(panel, rows, out, work); break;
    }
}

static int is_available(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
           && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}

const gguf_kernels gguf_avx512 = {"avx512_vnni", is_available, multiply, round_row};
#pragma GCC pop_options
#else
static int is_available(void) { return 0; }
const gguf_kernels gguf_avx512 = {"avx512_vnni", is_available, 0, 0};
#endif
