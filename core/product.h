// The one inner product of the library: rows of broadcast units times a panel of vectors, accumulated in registers.
// Scores (queries times packed keys) and weighted sums (weights times values) are both this product.
#pragma once

#include "storage.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

// sums[row][v] += sum over i of a[row * row_step + i * unit_step] * b[i * b_step + v]: one chain over ascending i for
// each result, whatever the number of rows, which is what the bits rule asks for.
template <class P, int rows, int row_step, int unit_step, int units_ahead = 0>
inline __attribute__((always_inline)) void multiply(const typename P::Unit* a, const typename P::Unit* b,
                                                    int64_t b_step, int64_t depth,
                                                    Vector<typename P::Number> (&sums)[rows][panel_vectors]) {
  using Unit = typename P::Unit;
#pragma GCC unroll 4
  for (int64_t i = 0; i < depth; ++i) {
    Vector<Unit> right[panel_vectors];
#pragma GCC unroll 4
    for (int v = 0; v < panel_vectors; ++v) {
      right[v] = load(b + v * lanes<Unit>);
      if constexpr (units_ahead > 0) __builtin_prefetch(b + units_ahead * b_step + v * lanes<Unit>);
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < panel_vectors; ++v) {
        sums[row][v] = P::multiply_add(a[row * row_step], right[v], sums[row][v]);
      }
    }
    a += unit_step;
    b += b_step;
  }
}

// One panel of scores: scale times the products, to scores[row * step + 0 .. panel_lanes).
template <class P, int rows, int step>
void score_panel(const typename P::Unit* queries, const typename P::Unit* keys, int64_t units, typename P::Number scale,
                 typename P::Number* scores) {
  using T = typename P::Number;
  Vector<T> sums[rows][panel_vectors] = {};
  multiply<P, rows, 1, rows>(queries, keys, panel_lanes<P>, units, sums);
  const Vector<T> factor = splat(scale);
#pragma GCC unroll 12
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < panel_vectors; ++v) store(scores + row * step + v * lanes<T>, sums[row][v] * factor);
  }
}

// One panel of a weighted sum: accumulator[row] = accumulator[row] * rescale[row] + weights[row] times values.
template <class P, int rows, int units_ahead = 0>
void weigh_panel(const typename P::Unit* weights, const typename P::Unit* values, int64_t values_step, int64_t units,
                 const typename P::Number* rescale, typename P::Number* accumulator, int64_t accumulator_step) {
  using T = typename P::Number;
  Vector<T> sums[rows][panel_vectors];
#pragma GCC unroll 12
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < panel_vectors; ++v) {
      sums[row][v] = load(accumulator + row * accumulator_step + v * lanes<T>) * splat(rescale[row]);
    }
  }
  multiply<P, rows, tile_units<P>, 1, units_ahead>(weights, values, values_step, units, sums);
#pragma GCC unroll 12
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < panel_vectors; ++v) store(accumulator + row * accumulator_step + v * lanes<T>, sums[row][v]);
  }
}

// One panel of a sum that goes on: sums[row] += a[row] times b, for the gradients.
template <class P, int rows, int row_step, int unit_step>
void add_panel(const typename P::Unit* a, const typename P::Unit* b, int64_t units, typename P::Number* target,
               int64_t target_step) {
  using T = typename P::Number;
  Vector<T> sums[rows][panel_vectors];
#pragma GCC unroll 12
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < panel_vectors; ++v) sums[row][v] = load(target + row * target_step + v * lanes<T>);
  }
  multiply<P, rows, row_step, unit_step>(a, b, panel_lanes<P>, units, sums);
#pragma GCC unroll 12
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < panel_vectors; ++v) store(target + row * target_step + v * lanes<T>, sums[row][v]);
  }
}

template <int value>
struct Count {
  static constexpr int count = value;
};

// Calls function(Count<rows>) for a number of rows known only at run time.
template <int most, class Function>
inline __attribute__((always_inline)) void with_rows(int rows, const Function& function) {
  if (rows == most) {
    function(Count<most>{});
  } else if constexpr (most > 1) {
    with_rows<most - 1>(rows, function);
  }
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
