// e^x for x <= 0 and tanh, on vectors. Polynomials: Chebyshev fits of (2^f - 1) / f on [-1/2, 1/2] and of
// (tanh(x) / x - 1) / x^2 on x^2 <= 0.4, computed with 50 digits; the first term is exact, so e^0 is exactly 1.
#pragma once

#include "simd.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

template <class T>
struct Constants;

template <>
struct Constants<float> {
  static constexpr float log2_e = 1.44269504088896340736f;
  static constexpr float rounder = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  static constexpr int exponent_shift = 23;
  static constexpr float lowest_exponent = -125;  // 2^n is zero below: it would be subnormal
  static constexpr float smallest = 0x1p-126f;
  static constexpr float linear_tanh = 0x1p-13f;  // x^2 / 3 is below half a unit in the last place
  static constexpr float largest = 0x1.fffffep127f;
  static constexpr float infinity = __builtin_inff();
  static constexpr float exp2[] = {0.693147188f,    0.2402265076f,   0.05550357114f,
                                   0.009618082557f, 0.001339086336f, 0.0001545316295f};
  static constexpr float tanh[] = {-0.3333333315f, 0.1333330015f,    -0.05395846163f,
                                   0.02176250291f, -0.008323187058f, 0.002269501684f};
};

template <>
struct Constants<double> {
  static constexpr double log2_e = 1.44269504088896340736;
  static constexpr double rounder = 0x1.8p52;
  static constexpr int exponent_shift = 52;
  static constexpr double lowest_exponent = -1021;
  static constexpr double smallest = 0x1p-1022;
  static constexpr double linear_tanh = 0x1p-27;
  static constexpr double largest = 0x1.fffffffffffffp1023;
  static constexpr double infinity = __builtin_inf();
  static constexpr double exp2[] = {0.69314718055994530942,     0.2402265069591009822,    0.055504108664821594339,
                                    0.0096181291076068885273,   0.001333355814641693531,  0.00015403530441736050155,
                                    0.000015252733829836118394, 1.3215442587921689653e-6, 1.0178062445845773521e-7,
                                    7.0725859692492236999e-9,   4.4549605981865183938e-10};
  static constexpr double tanh[] = {-0.33333333333333333333,   0.13333333333333332622,      -0.053968253968252809292,
                                    0.021869488536080744161,   -0.0088632355274013171307,   0.0035921279861448631654,
                                    -0.0014558337264772230165, 0.00059002154565090968765,   -0.00023909225607937784483,
                                    0.00009675175218326438376, -0.000038762027320133520449, 0.00001477463274551532683,
                                    -4.7175184255083209527e-6, 8.9560645481586557491e-7};
};

template <class T, int count>
inline Vector<T> polynomial(const T (&coefficients)[count], Vector<T> x) {
  Vector<T> value = splat(coefficients[count - 1]);
#pragma GCC unroll 16
  for (int i = count - 2; i >= 0; --i) value = fma(value, x, splat(coefficients[i]));
  return value;
}

// e^x for x <= 0: exactly 1 at 0, exactly 0 below the smallest normal number and at -inf, NaN at NaN.
template <class T>
inline Vector<T> exp_nonpositive(Vector<T> x) {
  using C = Constants<T>;
  using Whole = Vector<Integer<T>>;
  const Vector<T> rounder = splat(C::rounder);
  const Vector<T> rate = splat(C::log2_e);
  const Vector<T> shifted = fma(x, rate, rounder);
  const Vector<T> whole = shifted - rounder;
  const Vector<T> fraction = fma(x, rate, -whole);
  const Vector<T> power = fma(polynomial(C::exp2, fraction), fraction, splat(T{1}));
  // The rounder's own bits leave with the shift, and a NaN's low bits are zero: what is added is 2^n's exponent, or
  // none.
  const Vector<T> scaled = (Vector<T>)((Whole)power + ((Whole)shifted << C::exponent_shift));
  return whole < splat(C::lowest_exponent) ? Vector<T>{} : scaled;
}

template <class T>
inline T exp_nonpositive(T x) {
  return exp_nonpositive<T>(splat(x))[0];
}

// Near zero a polynomial, because 1 - e^(-2|x|) cancels there; elsewhere (1 - e) / (1 + e) with the sign put back.
template <class T>
inline Vector<T> tanh(Vector<T> x) {
  using C = Constants<T>;
  const Vector<T> magnitude = x < Vector<T>{} ? -x : x;
  const Vector<T> square = x * x;
  const Vector<T> near_zero = fma(polynomial(C::tanh, square) * square, x, x);
  const Vector<T> decay = exp_nonpositive<T>(splat(T{-2}) * magnitude);
  const Vector<T> one = splat(T{1});
  const Vector<T> large = (one - decay) / (one + decay);
  const Vector<T> with_sign = x < Vector<T>{} ? -large : large;
  return magnitude < splat(static_cast<T>(0.625)) ? near_zero : with_sign;
}

// softcap * tanh(s / softcap), and s itself where that quotient is so small that they are equal: it may be subnormal.
template <class T>
inline Vector<T> capped(Vector<T> s, T softcap) {
  const Vector<T> quotient = s / splat(softcap);
  const Vector<T> magnitude = quotient < Vector<T>{} ? -quotient : quotient;
  return magnitude < splat(Constants<T>::linear_tanh) ? s : splat(softcap) * tanh<T>(quotient);
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
