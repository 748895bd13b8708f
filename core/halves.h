// Half-precision types for the instruction set that this translation unit is compiled for: conversions, and the product
// of pairs of bfloat16.
#pragma once

#include "simd.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of_bfloat16(uint16_t bits) { return float_of_bits(uint32_t{bits} << 16); }

// To nearest, ties to even; NaN stays NaN (a payload in the low half must not round to infinity).
inline uint16_t bfloat16_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// In integers, because a subnormal float16 must survive denormals-are-zero.
inline float float_of_float16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u;
  const uint32_t mantissa = half & 1023u;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  if (exponent != 0) return float_of_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

inline uint16_t float16_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude >= 0x38800000u) {
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);
  const int shift = 126 - static_cast<int>(magnitude >> 23);  // 14 .. 24: the subnormal's bits below its last place
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t kept = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1u);
  const uint32_t half_way = 1u << (shift - 1);
  const uint32_t up = rest > half_way || (rest == half_way && (kept & 1u)) ? 1u : 0u;
  return static_cast<uint16_t>(sign | (kept + up));
}

inline Vector<float> load_float16(const char* source) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#elif defined(__aarch64__)
  return (Vector<float>)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(source))));
#else
  Vector<float> result;
  for (int lane = 0; lane < lanes<float>; ++lane) {
    uint16_t half;
    std::memcpy(&half, source + 2 * lane, sizeof half);
    result[lane] = float_of_float16(half);
  }
  return result;
#endif
}

// 16-bit lanes, as many as a vector has 32-bit lanes, zero-extended.
inline Vector<uint32_t> load_halves(const char* source) {
  typename VectorOf<uint16_t, vector_bytes / 2>::type halves;
  std::memcpy(&halves, source, sizeof halves);
  return __builtin_convertvector(halves, Vector<uint32_t>);
}

inline Vector<float> load_bfloat16(const char* source) { return (Vector<float>)(load_halves(source) << 16); }

#if defined(__AVX512BF16__)
#define SOFTLOOKUP_BFLOAT16_DOT 1
// c + a1 b1 + a0 b0 per 32-bit lane, bfloat16 products in float32.
inline Vector<float> dot_bfloat16(Vector<uint32_t> a, Vector<uint32_t> b, Vector<float> c) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
#else
#define SOFTLOOKUP_BFLOAT16_DOT 0
#endif

// Rounds a vector without subnormal numbers to bfloat16 and stores it in half the bytes.
inline void store_bfloat16(uint16_t* target, Vector<float> value) {
#if SOFTLOOKUP_BFLOAT16_DOT
  const __m256bh halves = _mm512_cvtneps_pbh(value);
#else
  const auto bits = (Vector<uint32_t>)value;
  const Vector<uint32_t> rounded = (bits + splat(0x7fffu) + ((bits >> 16) & splat(1u))) >> 16;
  const Vector<uint32_t> quiet = (bits >> 16) | splat(0x40u);
  const Vector<uint32_t> chosen = (bits & splat(0x7fffffffu)) > splat(0x7f800000u) ? quiet : rounded;
  const auto halves = __builtin_convertvector(chosen, typename VectorOf<uint16_t, vector_bytes / 2>::type);
#endif
  std::memcpy(target, &halves, sizeof halves);
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
