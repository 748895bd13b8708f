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
                                                    Vector<typename P::Sum> (&sums)[rows][vectors], int64_t ahead) {
  using Unit = typename P::Unit;
#pragma GCC unroll 4
  for (int64_t i = 0; i < depth; i += P::units_loaded) {
    Vector<Unit> right[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      const Stored* source = b + v / panel_vectors * panel_step + v % panel_vectors * lanes<Unit>;
      right[v] = P::load_stored(source);
      if (asks && v * lanes<Unit> * static_cast<int>(sizeof(Stored)) % line_bytes == 0) prefetch_near(source + ahead);
    }
#pragma GCC unroll 4
    for (int unit = 0; unit < P::units_loaded; ++unit) {
      Vector<Unit> operands[vectors];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) operands[v] = P::unit_of(right[v], unit);
#pragma GCC unroll 12
      for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
          sums[row][v] = P::multiply_add(a[unit * unit_step + row * row_step], operands[v], sums[row][v]);
        }
      }
    }
    a += P::units_loaded * unit_step;
    b += b_step;
  }
}

// Panels, units `step` apart, panels `panel_step`.
template <class Stored>
struct Panels {
  const Stored* units;
  int64_t step;
  int64_t panel_step;
};

// The product of `height` rows and some panels, cut into what the registers hold: a strip's rows times one panel, or
// half of them, or few, times two, which loads fewer operands. Sums begin with what start(row, v) gives and go to
// end(row, v, sum).
template <class P, int height, int panels, int row_step, int unit_step, bool asks, class Stored, class Start, class End>
inline __attribute__((always_inline)) void multiply_cut(const typename P::Unit* a, const Panels<Stored>& b,
                                                        int64_t depth, int64_t ahead, const Start& start,
                                                        const End& end) {
  constexpr int rows = panels == 1 || height <= P::pair_rows ? height : height / panels;
  constexpr int vectors = panels * panel_vectors;
  static_assert(height % rows == 0);
  for (int first = 0; first < height; first += rows) {
    Vector<typename P::Sum> sums[rows][vectors];
#pragma GCC unroll 12
    for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[row][v] = start(first + row, v);
    }
    multiply<P, row_step, unit_step, asks>(a + first * row_step, b.units, b.step, b.panel_step, depth, sums, ahead);
#pragma GCC unroll 12
    for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) end(first + row, v, sums[row][v]);
    }
  }
}

// Scores of `height` rows against `panels` packed panels: scale times the products, to scores[row * step + lane].
template <class P, int height, int step, int panels = 1, bool asks = false>
void score_panels(const typename P::Unit* queries, const typename P::Stored* keys, int64_t units,
                  typename P::Number scale, typename P::Number* scores, int64_t ahead = 0) {
  using T = typename P::Number;
  const Panels<typename P::Stored> b = {keys, panel_lanes<P>, units * panel_lanes<P>};
  multiply_cut<P, height, panels, 1, height, asks>(
      queries, b, units, ahead, [](int, int) { return Vector<T>{}; },
      [&](int row, int v, Vector<T> sum) { store(scores + row * step + v * lanes<T>, sum * splat(scale)); });
}

// A weighted sum over `units`: accumulator[row] = accumulator[row] * rescale[row] + weights[row] times the values.
template <class P, int height, int panels = 1, bool asks = false, class Stored>
void weigh_panels(const typename P::Unit* weights, const Panels<Stored>& values, int64_t units,
                  const typename P::Number* rescale, typename P::Number* accumulator, int64_t accumulator_step,
                  int64_t ahead = 0) {
  using T = typename P::Number;
  const auto place = [&](int row, int v) { return accumulator + row * accumulator_step + v * lanes<T>; };
  multiply_cut<P, height, panels, tile_units<P>, 1, asks>(
      weights, values, units, ahead, [&](int row, int v) { return load(place(row, v)) * splat(rescale[row]); },
      [&](int row, int v, Vector<T> sum) { store(place(row, v), sum); });
}

// A sum that goes on: target[row] += a[row] times b, for the gradients.
template <class P, int height, int row_step, int unit_step, int panels = 1>
void add_panels(const typename P::Unit* a, const typename P::Unit* b, int64_t panel_step, int64_t units,
                typename P::Number* target, int64_t target_step) {
  using T = typename P::Number;
  const Panels<typename P::Unit> panels_of_b = {b, panel_lanes<P>, panel_step};
  const auto place = [&](int row, int v) { return target + row * target_step + v * lanes<T>; };
  multiply_cut<P, height, panels, row_step, unit_step, false>(
      a, panels_of_b, units, 0, [&](int row, int v) { return load(place(row, v)); },
      [&](int row, int v, Vector<T> sum) { store(place(row, v), sum); });
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
// them where the registers hold the sums of all rows, or of half a full strip.
template <class P, class Function>
inline __attribute__((always_inline)) void with_panels(int rows, int64_t first, int64_t last,
                                                       const Function& function) {
  int64_t panel = first;
  if constexpr (P::pair_rows > 0) {
    if (2 * P::pair_rows >= P::strip_rows && rows == P::strip_rows) {
      for (; panel + 2 <= last; panel += 2) function(Count<P::strip_rows>{}, Count<2>{}, panel);
    } else if (rows <= P::pair_rows) {
      for (; panel + 2 <= last; panel += 2) {
        with_rows<P::pair_rows>(rows, [&](auto count) { function(count, Count<2>{}, panel); });
      }
    }
  }
  for (; panel < last; ++panel) {
    with_rows<P::strip_rows>(rows, [&](auto count) { function(count, Count<1>{}, panel); });
  }
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
