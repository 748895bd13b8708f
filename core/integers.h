// Integer lanes for codes: 16-bit integers in pairs, one pair a 32-bit lane. Their products are exact, so every
// instruction set gives the same sums.
#pragma once

#include "simd.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

using Halfwords = typename VectorOf<int16_t>::type;

// c + a1 b1 + a0 b0 in every lane. Nothing overflows as long as the whole sum is below 2^31.
inline Vector<int32_t> dot_int16(Vector<uint32_t> a, Vector<uint32_t> b, Vector<int32_t> c) {
#if defined(__AVX512VNNI__)
  return (Vector<int32_t>)_mm512_dpwssd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return c + (Vector<int32_t>)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return c + (Vector<int32_t>)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return c + (Vector<int32_t>)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  const auto left = (int16x8_t)a;
  const auto right = (int16x8_t)b;
  const int32x4_t low = vmull_s16(vget_low_s16(left), vget_low_s16(right));
  const int32x4_t high = vmull_s16(vget_high_s16(left), vget_high_s16(right));
  return c + (Vector<int32_t>)vpaddq_s32(low, high);
#endif
}

// To the nearest integer, ties to even, of numbers within the range of 32 bits.
inline Vector<int32_t> nearest(Vector<float> value) {
#if defined(__AVX512F__)
  return (Vector<int32_t>)_mm512_maskz_cvtps_epi32(0xffff, value);
#elif defined(__AVX2__)
  return (Vector<int32_t>)_mm256_cvtps_epi32(value);
#elif defined(__x86_64__)
  return (Vector<int32_t>)_mm_cvtps_epi32(value);
#elif defined(__aarch64__)
  return (Vector<int32_t>)vcvtnq_s32_f32((float32x4_t)value);
#endif
}

inline Vector<float> floats_of(Vector<int32_t> value) { return __builtin_convertvector(value, Vector<float>); }

// Stores integers that fit 16 bits in half the bytes.
inline void store_int16(int16_t* target, Vector<int32_t> value) {
  const auto halves = __builtin_convertvector(value, typename VectorOf<int16_t, vector_bytes / 2>::type);
  std::memcpy(target, &halves, sizeof halves);
}

// Bytes, half as many as a vector has, as 16-bit integers.
inline Vector<uint32_t> load_int8(const char* source) {
#if defined(__AVX512BW__)
  return (Vector<uint32_t>)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
#elif defined(__AVX2__)
  return (Vector<uint32_t>)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#else
  typename VectorOf<int8_t, vector_bytes / 2>::type bytes;
  std::memcpy(&bytes, source, sizeof bytes);
  return (Vector<uint32_t>)__builtin_convertvector(bytes, Halfwords);
#endif
}

// Of four signed 4-bit integers in every 16-bit lane, those in bits 4i .. 4i + 3.
inline Vector<uint32_t> int4_of(Vector<uint32_t> words, int i) {
  return (Vector<uint32_t>)(((Halfwords)words << (12 - 4 * i)) >> 12);
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
