/* One vector type for every processor: 16 lanes with AVX-512, 8 with AVX2, 4 elsewhere (NEON, or plain C).
 *
 * All products are exact integers or single chains of fused multiply-adds, so a processor's width never shows in a sum's
 * order. Without a fused multiply-add (plain C) the compiler may round twice.
 */
#ifndef ATOM_LINEAR_VEC_H
#define ATOM_LINEAR_VEC_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define VL 16
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define VL 8
#else
#define VL 4
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef int8_t vb __attribute__((vector_size(VL)));
/* The same, wherever they lie in memory. */
typedef vf vf_mem __attribute__((aligned(4), may_alias));
typedef vu vu_mem __attribute__((aligned(4), may_alias));
typedef vh vh_mem __attribute__((aligned(2), may_alias));
typedef vb vb_mem __attribute__((aligned(1), may_alias));

INLINE vf load_f(const float *p) { return *(const vf_mem *)p; }
INLINE void store_f(float *p, vf v) { *(vf_mem *)p = v; }
INLINE vu load_u(const uint32_t *p) { return *(const vu_mem *)p; }
INLINE void store_u(uint32_t *p, vu v) { *(vu_mem *)p = v; }

INLINE vi all_i(int32_t x) { return (vi){0} + x; }
INLINE vf all_f(float x) {
#if VL == 16
    return (vf)_mm512_set1_ps(x);
#elif VL == 8
    return (vf)_mm256_set1_ps(x);
#else
    return (vf){x, x, x, x};
#endif
}

INLINE vf fma_f(vf a, vf b, vf c) /* a * b + c */
{
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vf to_f(vi v) { return __builtin_convertvector(v, vf); }
INLINE vf max_f(vf a, vf b) { return (vf)(((vi)a & (a > b)) | ((vi)b & ~(a > b))); }
INLINE vf min_f(vf a, vf b) { return (vf)(((vi)a & (a < b)) | ((vi)b & ~(a < b))); }
INLINE vf abs_f(vf a) { return (vf)((vi)a & 0x7fffffff); }

/* To the nearest integer, ties to even; |v| < 2^31. */
INLINE vi round_i(vf v) {
#if VL == 16
    return (vi)_mm512_cvtps_epi32((__m512)v);
#elif VL == 8
    return (vi)_mm256_cvtps_epi32((__m256)v);
#else
    const vf magic = all_f(12582912.0f); /* 1.5 * 2^23; exact for |v| < 2^22, which is all that is asked of it */
    vf shifted = v + magic;
    return (vi)shifted - (vi)magic;
#endif
}

INLINE float highest(vf v) {
#if VL == 16
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < VL; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

INLINE float total(vf v) /* in an order of the processor's own: not for results that must not depend on it */
{
#if VL == 16
    return _mm512_reduce_add_ps((__m512)v);
#else
    float sum = v[0];
    for (int i = 1; i < VL; i++) sum += v[i];
    return sum;
#endif
}

/* acc + the four products of unsigned bytes of u with signed bytes of s, lane by lane, exactly. */
INLINE vi dot4(vi acc, vu u, vu s) {
#if VL == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s);
#elif VL == 16
    const __m512i low = _mm512_set1_epi16(0xff), a = (__m512i)u, b = (__m512i)s;
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, low), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
    return acc + (vi)even + (vi)odd;
#elif VL == 8 && defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)u, (__m256i)s);
#elif VL == 8
    const __m256i low = _mm256_set1_epi16(0xff), a = (__m256i)u, b = (__m256i)s;
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return acc + (vi)even + (vi)odd;
#else
    vi a = (vi)u, b = (vi)s;
    acc += (a & 255) * ((b << 24) >> 24);
    acc += ((a >> 8) & 255) * ((b << 16) >> 24);
    acc += ((a >> 16) & 255) * ((b << 8) >> 24);
    return acc + ((a >> 24) & 255) * (b >> 24);
#endif
}

#if VL == 16 && defined(__AVX512BF16__) && defined(ATOM_FAST_BF16)
#define HAS_DOT_BF16 1 /* not where a processor has it at half the rate of fp32 (Intel without AMX) */
/* acc + the two bf16 products of each lane, low half first. */
INLINE vf dot2_bf16(vf acc, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
#else
#define HAS_DOT_BF16 0
#endif

INLINE vf widen(vh v) { return (vf)(__builtin_convertvector(v, vu) << 16); }

/* fp32 to bf16, ties to even; a NaN stays one. */
INLINE vh narrow(vf v) {
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu is_nan = (vu)((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((rounded & ~is_nan) | (((bits >> 16) | 0x40) & is_nan), vh);
}

INLINE float widen_one(uint16_t v) {
    uint32_t bits = (uint32_t)v << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

/* e^x with a relative error below 3e-7; 0 below -87.3, e^88 above 88 (so products stay finite until then). */
INLINE vf exp_f(vf x) {
    x = min_f(max_f(x, all_f(-87.3f)), all_f(88.0f));
    vi n = round_i(x * 1.44269504f);
    vf r = fma_f(to_f(n), all_f(-0.693145752f), x);
    r = fma_f(to_f(n), all_f(-1.42860677e-6f), r);
    vf p = all_f(1.0f / 5040);
    p = fma_f(p, r, all_f(1.0f / 720));
    p = fma_f(p, r, all_f(1.0f / 120));
    p = fma_f(p, r, all_f(1.0f / 24));
    p = fma_f(p, r, all_f(1.0f / 6));
    p = fma_f(p, r, all_f(0.5f));
    p = fma_f(p, r, all_f(1.0f));
    p = fma_f(p, r, all_f(1.0f));
    return p * (vf)((n + 127) << 23);
}

#endif
