// Integer lanes for codes: 16-bit integers in pairs or bytes in fours, that many a 32-bit lane. Their products are
// exact, so every instruction set gives the same sums.
#pragma once

#include "simd.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

using Halfwords = typename VectorOf<int16_t>::type;
using Bytes = typename VectorOf<int8_t>::type;

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

// c plus the four products of unsigned bytes and signed ones in every lane. The sum of two successive products must fit
// 16 bits.
inline Vector<int32_t> dot_bytes(Vector<uint32_t> unsigned_bytes, Vector<uint32_t> signed_bytes, Vector<int32_t> c) {
#if defined(__AVX512VNNI__)
  return (Vector<int32_t>)_mm512_dpbusd_epi32((__m512i)c, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)unsigned_bytes, (__m512i)signed_bytes);
  return dot_int16((Vector<uint32_t>)pairs, splat(0x00010001u), c);
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)signed_bytes);
  return dot_int16((Vector<uint32_t>)pairs, splat(0x00010001u), c);
#else
  const auto low = (Vector<uint32_t>)(((Halfwords)signed_bytes << 8) >> 8);
  const auto high = (Vector<uint32_t>)((Halfwords)signed_bytes >> 8);
  const Vector<uint32_t> low_bytes = splat(0x00ff00ffu);
  return dot_int16(unsigned_bytes & low_bytes, low, dot_int16((unsigned_bytes >> 8) & low_bytes, high, c));
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

// Stores integers that fit the fewer bits of a code.
template <class Code>
inline void store_codes(Code* target, Vector<int32_t> value) {
  constexpr int bytes = lanes<int32_t> * static_cast<int>(sizeof(Code));
  const auto codes = __builtin_convertvector(value, typename VectorOf<Code, bytes>::type);
  std::memcpy(target, &codes, sizeof codes);
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

// Of the eight 4-bit integers of every lane, four as bytes: the low halves of its bytes or the high ones. Unsigned ones
// as they are, signed ones times nibble_step.
inline Vector<uint32_t> unsigned_nibbles(Vector<uint32_t> words, int high) {
  return (high ? words >> 4 : words) & splat(0x0f0f0f0fu);
}
#if defined(__AVX512VNNI__)
constexpr int nibble_step = 16;  // where they stand in the upper half of a byte, which needs no sign to be spread
inline Vector<uint32_t> signed_nibbles(Vector<uint32_t> words, int high) {
  return (high ? words : words << 4) & splat(0xf0f0f0f0u);
}
#else
constexpr int nibble_step = 1;  // two larger products would not fit 16 bits
inline Vector<uint32_t> signed_nibbles(Vector<uint32_t> words, int high) {
  const Vector<uint32_t> eight = splat(0x08080808u);
  return (Vector<uint32_t>)((Bytes)(unsigned_nibbles(words, high) ^ eight) - (Bytes)eight);
}
#endif

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
