// Views of rows in the arrays of a call, and single numbers of any type read and written.
#pragma once

#include "halves.h"
#include "kernels.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

// A view [rows, columns], strides in bytes. Query rows come query-major: `group` heads of one query are neighbours, and
// where only some queries are wanted, `chosen` tells which.
struct Matrix {
  const char* data;
  int64_t row;
  int64_t column;
  int64_t rows;
  int64_t columns;
  Type type;
  int64_t group = 1;
  int64_t member = 0;  // from one head of the group to the next
  const int64_t* chosen = nullptr;

  const char* at(int64_t r, int64_t c) const {
    const int64_t index = group == 1 ? r : r / group;
    const int64_t head = group == 1 ? 0 : r % group;
    return data + (chosen ? chosen[index] : index) * row + head * member + c * column;
  }
};

// Rows first .. last - 1 of a matrix of plain rows, as far as they exist.
inline Matrix rows_between(Matrix matrix, int64_t first, int64_t last) {
  const int64_t low = first < 0 ? 0 : first;
  const int64_t high = last < matrix.rows ? last : matrix.rows;
  matrix.data += low * matrix.row;
  matrix.rows = high > low ? high - low : 0;
  return matrix;
}

template <class T>
inline T number_at(Type type, const char* source) {
  if (type == Type::float64) {
    double value;
    std::memcpy(&value, source, sizeof value);
    return static_cast<T>(value);
  }
  if (type == Type::float32) {
    float value;
    std::memcpy(&value, source, sizeof value);
    return static_cast<T>(value);
  }
  uint16_t bits;
  std::memcpy(&bits, source, sizeof bits);
  return static_cast<T>(type == Type::float16 ? float_of_float16(bits) : float_of_bfloat16(bits));
}

// A double as a float that remembers in its last bit whether it is exact, so that rounding it again rounds but once.
inline float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  if (!(back < value || back > value)) return nearest;
  const bool too_large = (back < 0 ? -back : back) > (value < 0 ? -value : value);
  return float_of_bits((bits_of_float(nearest) - (too_large ? 1u : 0u)) | 1u);
}

inline void put_number(Type type, char* target, double value) {
  if (type == Type::float64) {
    std::memcpy(target, &value, sizeof value);
  } else if (type == Type::float32) {
    const float narrow = static_cast<float>(value);
    std::memcpy(target, &narrow, sizeof narrow);
  } else {
    const float narrow = round_to_odd(value);
    const uint16_t bits = type == Type::float16 ? float16_of_float(narrow) : bfloat16_of_float(narrow);
    std::memcpy(target, &bits, sizeof bits);
  }
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
