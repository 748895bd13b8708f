// The one inner product of the library: rows of broadcast units times a panel of vectors, accumulated in registers.
// Scores (queries times packed keys) and weighted sums (weights times values) are both this product.
#pragma once

#include "storage.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

// sums[row][v] += sum over i of a[row * row_step + i * unit_step] * b[i * b_step + v]: one chain over ascending i for
// each result, whatever the number of rows, which is what the bits rule asks for. The vectors are those of one or more
// panels, `panel_step` units apart. Who `asks` for what lies `ahead` of each unit has memory work meanwhile.
template <class P, int row_step, int unit_step, bool asks = false, class Stored, int rows, int vectors>
inline __attribute__((always_inline)) void multiply(const typename P::Unit* a, const Stored* b, int64_t b_step,
                                                    int64_t panel_step, int64_t depth,
                                                    Vector<typename P::Sum> (&sums)[rows][vectors], int64_t ahead = 0) {
  using Unit = typename P::Unit;
#pragma GCC unroll 4
  for (int64_t i = 0; i < depth; i += P::units_loaded) {
    Vector<Unit> right[vectors][P::units_loaded];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      const Stored* source = b + v / panel_vectors * panel_step + v % panel_vectors * lanes<Unit>;
      P::load_stored(source, right[v]);
      if (asks && v * lanes<Unit> * static_cast<int>(sizeof(Stored)) % line_bytes == 0) prefetch_near(source + ahead);
    }
#pragma GCC unroll 4
    for (int unit = 0; unit < P::units_loaded; ++unit) {
#pragma GCC unroll 12
      for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
          sums[row][v] = P::multiply_add(a[unit * unit_step + row * row_step], right[v][unit], sums[row][v]);
        }
      }
    }
    a += P::units_loaded * unit_step;
    b += b_step;
  }
}

// How a product is cut into what the registers hold: a strip's rows times one panel, or half of them times two, which
// loads fewer operands.
template <int height, int panels>
struct Cut {
  static constexpr int rows = height / panels;
  static constexpr int vectors = panels * panel_vectors;
  static_assert(height % panels == 0);
};

// Scores of `height` rows against `panels` packed panels: scale times the products, to scores[row * step + lane].
template <class P, int height, int step, int panels = 1, bool asks = false>
void score_panels(const typename P::Unit* queries, const typename P::Stored* keys, int64_t units,
                  typename P::Number scale, typename P::Number* scores, int64_t ahead = 0) {
  using T = typename P::Number;
  using C = Cut<height, panels>;
  const Vector<T> factor = splat(scale);
  for (int first = 0; first < height; first += C::rows) {
    Vector<T> sums[C::rows][C::vectors] = {};
    multiply<P, 1, height, asks>(queries + first, keys, panel_lanes<P>, units * panel_lanes<P>, units, sums, ahead);
#pragma GCC unroll 12
    for (int row = 0; row < C::rows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < C::vectors; ++v) store(scores + (first + row) * step + v * lanes<T>, sums[row][v] * factor);
    }
  }
}

// Panels of values, units `step` apart, panels `panel_step`.
template <class Stored>
struct Panels {
  const Stored* units;
  int64_t step;
  int64_t panel_step;
};

// A weighted sum over `units`: accumulator[row] = accumulator[row] * rescale[row] + weights[row] times the values.
template <class P, int height, int panels = 1, bool asks = false, class Stored>
void weigh_panels(const typename P::Unit* weights, const Panels<Stored>& values, int64_t units,
                  const typename P::Number* rescale, typename P::Number* accumulator, int64_t accumulator_step,
                  int64_t ahead = 0) {
  using T = typename P::Number;
  using C = Cut<height, panels>;
  for (int first = 0; first < height; first += C::rows) {
    T* target = accumulator + first * accumulator_step;
    Vector<T> sums[C::rows][C::vectors];
#pragma GCC unroll 12
    for (int row = 0; row < C::rows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < C::vectors; ++v) {
        sums[row][v] = load(target + row * accumulator_step + v * lanes<T>) * splat(rescale[first + row]);
      }
    }
    multiply<P, tile_units<P>, 1, asks>(weights + first * tile_units<P>, values.units, values.step, values.panel_step,
                                        units, sums, ahead);
#pragma GCC unroll 12
    for (int row = 0; row < C::rows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < C::vectors; ++v) store(target + row * accumulator_step + v * lanes<T>, sums[row][v]);
    }
  }
}

// A sum that goes on: target[row] += a[row] times b, for the gradients.
template <class P, int height, int row_step, int unit_step, int panels = 1>
void add_panels(const typename P::Unit* a, const typename P::Unit* b, int64_t panel_step, int64_t units,
                typename P::Number* target, int64_t target_step) {
  using T = typename P::Number;
  using C = Cut<height, panels>;
  for (int first = 0; first < height; first += C::rows) {
    T* rows = target + first * target_step;
    Vector<T> sums[C::rows][C::vectors];
#pragma GCC unroll 12
    for (int row = 0; row < C::rows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < C::vectors; ++v) sums[row][v] = load(rows + row * target_step + v * lanes<T>);
    }
    multiply<P, row_step, unit_step>(a + first * row_step, b, panel_lanes<P>, panel_step, units, sums);
#pragma GCC unroll 12
    for (int row = 0; row < C::rows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < C::vectors; ++v) store(rows + row * target_step + v * lanes<T>, sums[row][v]);
    }
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

// Calls function(Count<rows>, Count<panels>, panel) for a strip of `rows` and the panels first .. last - 1: pairs of
// them where the strip has its full height and the registers are many.
template <class P, class Function>
inline __attribute__((always_inline)) void with_panels(int rows, int64_t first, int64_t last,
                                                       const Function& function) {
  int64_t panel = first;
  if constexpr (P::panels_at_once == 2) {
    if (rows == P::strip_rows) {
      for (; panel + 2 <= last; panel += 2) function(Count<P::strip_rows>{}, Count<2>{}, panel);
    }
  }
  for (; panel < last; ++panel) {
    with_rows<P::strip_rows>(rows, [&](auto count) { function(count, Count<1>{}, panel); });
  }
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
