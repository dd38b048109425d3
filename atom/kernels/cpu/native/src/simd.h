/* Vectors of fp32 as wide as the target's: AVX-512 (16 lanes), AVX2 (8), NEON and everything else (4).
 *
 * vf is a GNU vector, so + - * / work on it, and a * b + c becomes one FMA. What has no operator is a function here.
 */
#ifndef ATOM_SIMD_H
#define ATOM_SIMD_H

#include "atom.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline, unused))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define V512 1
#define LANES 16
#define NUM_REGISTERS 32
#elif defined(__AVX2__) && defined(__FMA__)
#define V256 1
#define LANES 8
#define NUM_REGISTERS 16
#else
#define LANES 4
#ifdef __aarch64__
#define NUM_REGISTERS 32
#else
#define NUM_REGISTERS 16
#endif
#endif

typedef float vf __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), may_alias));
typedef float vf_any __attribute__((vector_size(4 * LANES), may_alias, aligned(4))); /* at any address */

typedef int32_t vi_any __attribute__((vector_size(4 * LANES), may_alias, aligned(2)));

INLINE vf v_load(const float *p) { return *(const vf_any *)p; }
INLINE void v_store(float *p, vf x) { *(vf_any *)p = x; }
INLINE vf v_set(float x) { return x - (vf){}; }
INLINE vf v_select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* The first n < LANES elements, zeros behind them. */
INLINE vf v_load_some(const float *p, int64_t n) {
#ifdef V512
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    vf x = {};
    memcpy(&x, p, 4 * n);
    return x;
#endif
}
INLINE void v_store_some(float *p, vf x, int64_t n) {
#ifdef V512
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
#else
    memcpy(p, &x, 4 * n);
#endif
}

/* b where either is NaN: the order of arguments decides whether one gets through. */
INLINE vf v_max(vf a, vf b) {
#if defined(V512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(V256)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#elif defined(__aarch64__)
    return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b); /* NaN from either side */
#else
    return v_select(a > b, a, b);
#endif
}
INLINE vf v_min(vf a, vf b) {
#if defined(V512)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(V256)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return -v_max(-a, -b);
#endif
}

INLINE int v_any(vi mask) {
#if defined(V512)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(V256)
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

INLINE float v_sum(vf x) {
#if defined(V512)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += x[i];
    return sum;
#endif
}
INLINE float v_largest(vf x) {
    float best = x[0];
    for (int i = 1; i < LANES; i++)
        best = x[i] > best ? x[i] : best;
    return best;
}

/* out[i] = the sum of x[i], for LANES vectors at once. */
INLINE vf v_sums(const vf *x) {
#if defined(V512)
    __m512 a[8], b[4], c[4];
    for (int i = 0; i < 8; i++) /* pairs of rows: in each quarter x0 x1 x0 x1 */
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps((__m512)x[2 * i], (__m512)x[2 * i + 1]),
                             _mm512_unpackhi_ps((__m512)x[2 * i], (__m512)x[2 * i + 1]));
    for (int i = 0; i < 4; i++) /* in each quarter x0 x1 x2 x3 */
        b[i] = _mm512_add_ps(_mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44), _mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
    c[0] = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
    c[1] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
    return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
#elif defined(V256)
    __m256 a[4], b[2];
    for (int i = 0; i < 4; i++)
        a[i] = _mm256_hadd_ps((__m256)x[2 * i], (__m256)x[2 * i + 1]);
    for (int i = 0; i < 2; i++)
        b[i] = _mm256_hadd_ps(a[2 * i], a[2 * i + 1]);
    return (vf)_mm256_add_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31));
#else
    vf sums = {};
    for (int i = 0; i < LANES; i++)
        sums[i] = v_sum(x[i]);
    return sums;
#endif
}

/* LANES bf16 widened, and rounded to nearest even (finite numbers). */
INLINE vf v_load_bf16(const bf16 *p) {
#if defined(V512)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(V256)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    vi x;
    for (int i = 0; i < LANES; i++)
        x[i] = (int32_t)((uint32_t)p[i] << 16);
    return (vf)x;
#endif
}
/* 2 LANES bf16 widened, those of even and of odd places apart: half the work of keeping their order. */
INLINE void v_load_pairs(const bf16 *p, vf *even, vf *odd) {
    vi pairs = *(const vi_any *)p;
    *even = (vf)(pairs << 16);
    *odd = (vf)(pairs & (int32_t)0xffff0000);
}
INLINE void v_store_bf16(bf16 *p, vf x) {
    typedef uint32_t vu __attribute__((vector_size(4 * LANES), may_alias));
    vu bits = (vu)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#if defined(V512)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)bits));
#elif defined(V256)
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)bits, (__m256i)bits), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
#else
    for (int i = 0; i < LANES; i++)
        p[i] = (bf16)bits[i];
#endif
}
INLINE float from_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
/* 0 for what is not finite. */
INLINE vf v_finite_or_zero(vf x) {
    vi is_finite = ((vi)x & 0x7f800000) != 0x7f800000;
    return (vf)((vi)x & is_finite);
}

/* 2^x; 0 below -126 (masked scores are -inf), inf above 128, NaN of NaN. Relative error 1e-7. */
INLINE vf v_exp2(vf x) {
    vf clamped = v_min(v_set(129.0f), v_max(v_set(-127.0f), x));
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vf shifted = clamped + magic;
    vf f = clamped - (shifted - magic); /* [-0.5, 0.5] */
    vf p = v_set(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    /* In two steps: 2^128 alone is no float, but 2^127 * 2 may be inf rightly. */
    vi n = (vi)shifted - 0x4b400000;
#ifdef V512
    return (vf)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), (__m512)p,
                                      _mm512_cvtepi32_ps((__m512i)n));
#else
    vi half = n >> 1;
    vf scaled = p * (vf)((half + 127) << 23) * (vf)((n - half + 127) << 23);
    return (vf)((vi)scaled & ~(vi)(x < -126.0f));
#endif
}
#define LOG2E 1.44269504088896341f
INLINE vf v_exp(vf x) { return v_exp2(x * LOG2E); }
INLINE vf v_tanh(vf x) {
    vf e = v_exp2(x * (2 * LOG2E));
    vf far = 1.0f - 2.0f / (e + 1.0f);
    vf square = x * x; /* near 0 the difference of 1s would lose digits: odd series instead */
    vf near = x * (1.0f + square * (-0.333333333f + square * (0.133333333f + square * (-0.0539682540f + square * 0.0218694885f))));
    return v_select(square < 0.0625f, near, far);
}
INLINE vf v_silu(vf x) { return x / (1.0f + v_exp(-x)); }
/* 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) = x * sigmoid of twice the argument */
INLINE vf v_gelu_tanh(vf x) {
    vf inner = x * (1.5957691216057308f + 0.071354816272600f * (x * x));
    return x / (1.0f + v_exp(-inner));
}

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#endif
