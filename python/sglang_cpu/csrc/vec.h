// Float vectors as wide as this unit's instruction set, in the vector extension of GCC and Clang.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace sglang_cpu {
namespace {  // internal to each unit: the linker must not pick another instruction set's copy

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

static_assert(kMostLanes % kLanes == 0, "what is padded for the widest vector holds whole vectors");

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef int32_t Vec4I __attribute__((vector_size(16)));

struct BFloat16 {
  uint16_t bits;
};

#define INLINE inline __attribute__((always_inline))
constexpr float kInfinity = __builtin_inff();

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE Vec broadcast(float x) { return x - Vec{}; }

INLINE Vec load(const float* p) {
  Vec x;
  memcpy(&x, p, sizeof x);
  return x;
}

INLINE Vec load(const BFloat16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)  // GCC makes six instructions of __builtin_convertvector
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  VecH h;
  memcpy(&h, p, sizeof h);
  return (Vec)(__builtin_convertvector(h, VecU) << 16);
#endif
}

INLINE void store(float* p, Vec x) { memcpy(p, &x, sizeof x); }

INLINE void store(BFloat16* p, Vec x) {  // to nearest, ties to even
  const VecU u = (VecU)x;
  const VecU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const VecU nan = rounded - rounded + 0x7fc0u;
  const VecH h = __builtin_convertvector(x != x ? nan : rounded, VecH);
  memcpy(p, &h, sizeof h);
}

INLINE float wide(float x) { return x; }

INLINE float wide(BFloat16 x) {
  const uint32_t u = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}

INLINE void narrow(float* p, float x) { *p = x; }

INLINE void narrow(BFloat16* p, float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  p->bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// Loads the first `count` elements; the other lanes are zero.
template <typename T>
INLINE Vec load_some(const T* p, int64_t count) {
  float part[kLanes] = {};
  for (int64_t i = 0; i < count; i++) part[i] = wide(p[i]);
  return load(part);
}

template <typename T>
INLINE void store_some(T* p, Vec x, int64_t count) {
  float part[kLanes];
  store(part, x);
  for (int64_t i = 0; i < count; i++) narrow(p + i, part[i]);
}

// Adds the upper half of the lanes to the lower half until four lanes are left. With 16 lanes, in blocks of four:
//
//   x = | X0 | X1 | X2 | X3 |  ->  | X0+X2 | X1+X3 |  ->  | (X0+X2) + (X1+X3) |
INLINE Vec4 fold(Vec x) {
#if defined(__AVX512F__)
  const __m512 w = (__m512)x;
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(w),
                                    _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(w), 1)));
  return (Vec4)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  return (Vec4)_mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
#else
  return x;
#endif
}

#if defined(__clang__)
#define SHUFFLE4(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE4(a, b, i, j, k, l) __builtin_shuffle(a, b, Vec4I{i, j, k, l})
#endif

// The sums of four vectors, each added in the order of `sum`.
INLINE Vec4 sums(Vec a, Vec b, Vec c, Vec d) {
  const Vec4 a4 = fold(a), b4 = fold(b), c4 = fold(c), d4 = fold(d);
  const Vec4 ab = SHUFFLE4(a4, b4, 0, 4, 1, 5) + SHUFFLE4(a4, b4, 2, 6, 3, 7);
  const Vec4 cd = SHUFFLE4(c4, d4, 0, 4, 1, 5) + SHUFFLE4(c4, d4, 2, 6, 3, 7);
  return SHUFFLE4(ab, cd, 0, 1, 4, 5) + SHUFFLE4(ab, cd, 2, 3, 6, 7);
}

INLINE float sum(Vec x) {
  const Vec4 y = fold(x);
  return (y[0] + y[2]) + (y[1] + y[3]);
}

#if defined(__AVX512F__)
// With 16 lanes, several vectors are folded together. A vector a has four blocks of four lanes, | A0 | A1 | A2 | A3 |;
// FOLD_BLOCKS picks blocks of a and b by LOW and by HIGH and adds them. FOLD_LANES does the same with the lanes of each
// block. Every sum adds the same pairs as `fold` and `sum` of a single vector, so it has the same bits.
//
//   folds(a, b, c, d), one line per FOLD_BLOCKS:
//     ab     = | A0+A2 | A1+A3 | B0+B2 | B1+B3 |    LOW 0x44 picks A0 A1 B0 B1, HIGH 0xee picks A2 A3 B2 B3
//     cd     = | C0+C2 | C1+C3 | D0+D2 | D1+D3 |
//     result = | fold(a) | fold(b) | fold(c) | fold(d) |    LOW 0x88 picks blocks 0 and 2, HIGH 0xdd blocks 1 and 3
//
//   halves(a, b, c, d, e, f, g, h), with the lanes of a block written out, a' = y0+y2 and a" = y1+y3 of y = fold(a):
//     abcd   = | fold(a) | fold(b) | fold(c) | fold(d) |
//     efgh   = | fold(e) | fold(f) | fold(g) | fold(h) |
//     result = | a' a" e' e" | b' b" f' f" | c' c" g' g" | d' d" h' h" |
//
//   sums<16>(x), with the vectors' numbers; the sum of vector i is i'+i":
//     even   = | 0' 0" 1' 1" | 4' 4" 5' 5" | 8'  8"  9'  9"  | 12' 12" 13' 13" |
//     odd    = | 2' 2" 3' 3" | 6' 6" 7' 7" | 10' 10" 11' 11" | 14' 14" 15' 15" |
//     out    = | 0  1  2  3  | 4  5  6  7  | 8   9   10  11  | 12  13  14  15  |
//
//   sums<8>(x):
//     all    = | 0' 0" 1' 1" | 2' 2" 3' 3" | 4' 4" 5' 5" | 6' 6" 7' 7" |
//     twice  = | 0  1  0  1  | 2  3  2  3  | 4  5  4  5  | 6  7  6  7  |    the mask 0x3333 keeps the first two of each
#define FOLD_BLOCKS(a, b, LOW, HIGH) _mm512_add_ps(_mm512_shuffle_f32x4(a, b, LOW), _mm512_shuffle_f32x4(a, b, HIGH))
#define FOLD_LANES(a, b, LOW, HIGH) _mm512_add_ps(_mm512_shuffle_ps(a, b, LOW), _mm512_shuffle_ps(a, b, HIGH))

// The folds of four vectors, one per block.
INLINE __m512 folds(Vec a, Vec b, Vec c, Vec d) {
  const __m512 ab = FOLD_BLOCKS((__m512)a, (__m512)b, 0x44, 0xee), cd = FOLD_BLOCKS((__m512)c, (__m512)d, 0x44, 0xee);
  return FOLD_BLOCKS(ab, cd, 0x88, 0xdd);
}

// Eight vectors, each folded to two lanes. Block i holds those of vector i, then those of vector i + 4.
INLINE __m512 halves(Vec a, Vec b, Vec c, Vec d, Vec e, Vec f, Vec g, Vec h) {
  const __m512 abcd = folds(a, b, c, d), efgh = folds(e, f, g, h);
  return FOLD_LANES(abcd, efgh, 0x44, 0xee);
}
#endif

// The sums of COUNT vectors, each added in the order of `sum`. Folding pairs of vectors together halves the shuffles.
template <int COUNT>
INLINE void sums(const Vec* x, float* out) {
#if defined(__AVX512F__)
  if constexpr (COUNT >= 16) {
    const __m512 even = halves(x[0], x[4], x[8], x[12], x[1], x[5], x[9], x[13]);
    const __m512 odd = halves(x[2], x[6], x[10], x[14], x[3], x[7], x[11], x[15]);
    _mm512_storeu_ps(out, FOLD_LANES(even, odd, 0x88, 0xdd));
    sums<COUNT - 16>(x + 16, out + 16);
  } else if constexpr (COUNT >= 8) {
    const __m512 all = halves(x[0], x[2], x[4], x[6], x[1], x[3], x[5], x[7]);
    const __m512 twice = FOLD_LANES(all, all, 0x88, 0xdd);
    _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_maskz_compress_ps(0x3333, twice)));
    sums<COUNT - 8>(x + 8, out + 8);
  } else
#endif
  if constexpr (COUNT >= 4) {
    const Vec4 four = sums(x[0], x[1], x[2], x[3]);
    memcpy(out, &four, sizeof four);
    sums<COUNT - 4>(x + 4, out + 4);
  } else if constexpr (COUNT > 0) {
    *out = sum(*x);
    sums<COUNT - 1>(x + 1, out + 1);
  }
}

INLINE float maximum(Vec x) {
  float best = x[0];
  for (int i = 1; i < kLanes; i++) best = x[i] > best ? x[i] : best;
  return best;
}

// exp(x) for x <= 0 within 2 ulp. Zero below -87.3, where the result would be subnormal; NaN for NaN.
// Cephes' expf: x = n ln2 + r with ln2 in two parts, a polynomial in r, n into the exponent.
INLINE Vec exp_negative(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const VecI tiny = x < -87.3f;
  const Vec shifted = x * 1.44269504088896341f + magic;
  const Vec n = shifted - magic;
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const VecU exponent = ((VecU)shifted << 23) + 0x3f800000u;  // n is in the low bits of `shifted`
  return tiny ? Vec{} : p * (Vec)exponent;
}

INLINE float exp_negative(float x) { return exp_negative(broadcast(x))[0]; }

INLINE Vec sigmoid(Vec x) {
  const Vec e = exp_negative(x > 0 ? -x : x);
  return (x > 0 ? broadcast(1.0f) : e) / (e + 1.0f);
}

}  // namespace
}  // namespace sglang_cpu
