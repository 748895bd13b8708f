// How keys, values and queries lie in the packed panels that the product reads, for each arithmetic. A unit is what one
// 32-bit (or 64-bit) broadcast carries: one float or double, or a pair of bfloat16. Everything else is written once
// over it.
#pragma once

#include "elementary.h"
#include "matrix.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

// What an arithmetic whose sums stand in vector registers asks of the layouts and of the order of work.
struct InRegisters {
  static constexpr bool coded = false;  // integer codes that scales belong to
  static constexpr int units_together = 1;
  static constexpr int units_loaded = 1;  // of one stored unit
  static constexpr int pair_rows = SOFTLOOKUP_ISA::pair_rows;
  static constexpr bool query_rows = false;    // queries row by row, not unit by unit
  static constexpr bool whole_blocks = false;  // scores of all tiles of a block before values are weighed
  static constexpr int strip_rows = SOFTLOOKUP_ISA::strip_rows;
  static constexpr int stack_strips = 4;

  // Whether queries took the scale up, exactly, and the products need none.
  static bool scale_queries(const void*, int64_t, double) { return false; }

  // A vector of stored units, and unit i of it.
  template <class Unit>
  static Vector<Unit> load_stored(const Unit* source) {
    return load(source);
  }
  template <class V>
  static V unit_of(V stored, int) {
    return stored;
  }
};

// One float or double a unit; half-precision sources are widened when they are packed.
template <class T>
struct Plain : InRegisters {
  using Number = T;
  using Sum = T;
  using Unit = T;
  using Stored = T;
  static constexpr int products = 1;
  static constexpr bool weights_over_scores = true;

  static Vector<T> multiply_add(Unit a, Vector<Unit> b, Vector<T> c) { return fma(splat(a), b, c); }

  // As many units as a vector holds, from contiguous elements.
  static Vector<Unit> load_units(Type type, const char* source) {
    if constexpr (sizeof(T) == 4) {
      if (type == Type::float16) return load_float16(source);
      if (type == Type::bfloat16) return load_bfloat16(source);
    }
    return load(reinterpret_cast<const T*>(source));
  }

  // The unit of a row of values: nothing to pair.
  static Vector<Unit> join_rows(Type type, const char* const (&rows)[1]) { return load_units(type, rows[0]); }

  static void store_weights(Unit* row, int64_t key, Vector<T> weights) { store(row + key, weights); }
  static T weight_at(const Unit* row, int64_t key) { return row[key]; }
  static void set_weight(Unit* row, int64_t key, T weight) { row[key] = weight; }

  // Of a vector of value units: which halves belong to a visible key, and whether one of them is not finite.
  static Vector<Unit> keep(Vector<Unit> units, const bool (&visible)[1]) { return visible[0] ? units : Vector<Unit>{}; }
  static bool finite(Vector<Unit> units, int) {
    const Vector<T> nothing = units - units;
    return sum_of<T>(nothing) == T{0};
  }
  static Vector<Unit> without_finite(Vector<Unit> units, int) {
    return units - units == Vector<T>{} ? Vector<Unit>{} : units;
  }
};

#if SOFTLOOKUP_BFLOAT16_DOT
// Two bfloat16 a unit, multiplied and added by one instruction: neighbours in d for the scores, neighbouring keys for
// the weighted sum.
struct PairedBfloat16 : InRegisters {
  using Number = float;
  using Sum = float;
  using Unit = uint32_t;
  using Stored = uint32_t;
  static constexpr int products = 2;
  static constexpr bool weights_over_scores = false;

  static Vector<float> multiply_add(Unit a, Vector<Unit> b, Vector<float> c) { return dot_bfloat16(splat(a), b, c); }

  static Vector<Unit> load_units(Type, const char* source) { return load(reinterpret_cast<const Unit*>(source)); }

  static Vector<Unit> join_rows(Type, const char* const (&rows)[2]) {
    const Vector<Unit> even = rows[0] ? load_halves(rows[0]) : Vector<Unit>{};
    const Vector<Unit> odd = rows[1] ? load_halves(rows[1]) : Vector<Unit>{};
    return even | (odd << 16);
  }

  static void store_weights(Unit* row, int64_t key, Vector<float> weights) {
    store_bfloat16(reinterpret_cast<uint16_t*>(row) + key, weights);
  }
  static float weight_at(const Unit* row, int64_t key) {
    uint16_t bits;
    std::memcpy(&bits, reinterpret_cast<const char*>(row) + 2 * key, sizeof bits);
    return float_of_bfloat16(bits);
  }
  static void set_weight(Unit* row, int64_t key, float weight) {
    const uint16_t bits = bfloat16_of_float(weight);
    std::memcpy(reinterpret_cast<char*>(row) + 2 * key, &bits, sizeof bits);
  }

  static Vector<Unit> keep(Vector<Unit> units, const bool (&visible)[2]) {
    return units & splat((visible[0] ? 0xffffu : 0u) | (visible[1] ? 0xffff0000u : 0u));
  }
  static bool finite(Vector<Unit> units, int product) {
    const Vector<float> numbers = (Vector<float>)(product ? units & splat(0xffff0000u) : units << 16);
    return sum_of<float>(numbers - numbers) == 0.0f;
  }
  static Vector<Unit> without_finite(Vector<Unit> units, int product) {
    const Vector<Unit> half = splat(product ? 0xffff0000u : 0xffffu);
    const Vector<float> numbers = (Vector<float>)(product ? units & half : units << 16);
    return numbers - numbers == Vector<float>{} ? units & ~half : units;
  }
};
#endif

template <class P>
constexpr int panel_lanes = panel_vectors * lanes<typename P::Number>;
template <class P>
constexpr int tile_panels = static_cast<int>(tile_keys) / panel_lanes<P>;
template <class P>
constexpr int64_t tile_units = tile_keys / P::products;
// From one row of weights to the next.
template <class P>
constexpr int64_t weight_step = P::weights_over_scores ? tile_keys : tile_units<P>;
// Tiles whose scores are kept at a time.
template <class P>
constexpr int64_t tiles_at_once = P::whole_blocks ? block_tiles : 1;
template <class P>
constexpr int64_t block_units = block_keys / P::products;
static_assert(tile_keys % (panel_vectors * lanes<float>) == 0 && tile_keys % (panel_vectors * lanes<double>) == 0);

// Zeros fill the last of the units that a product takes together.
template <class P>
inline int64_t units_of(int64_t elements) {
  constexpr int64_t together = P::units_together * P::products;
  return (elements + together - 1) / together * P::units_together;
}
template <class P>
inline int64_t padded_width(int64_t value_width) {
  return (value_width + panel_lanes<P> - 1) / panel_lanes<P> * panel_lanes<P>;
}

// Loads the units that start at an element of a contiguous row and fills what lies past its end with zeros: nothing is
// read past the end.
template <class P>
inline Vector<typename P::Unit> load_some(Type type, const char* source, int64_t elements) {
  using Unit = typename P::Unit;
  constexpr int64_t whole = lanes<Unit> * P::products;
  if (elements >= whole) return P::load_units(type, source);
  alignas(64) char copy[64 * 2] = {};
  std::memcpy(copy, source, static_cast<size_t>(elements * size_of(type)));
  return P::load_units(type, copy);
}

// The row itself where its columns touch, else a copy of it in `copy`.
inline const char* contiguous_row(const Matrix& matrix, int64_t row, char* copy) {
  const char* source = matrix.at(row, 0);
  const int64_t size = size_of(matrix.type);
  if (matrix.column == size || matrix.columns <= 1) return source;
  for (int64_t c = 0; c < matrix.columns; ++c) {
    std::memcpy(copy + c * size, source + c * matrix.column, static_cast<size_t>(size));
  }
  return copy;
}

// Rows of two matrices that are wanted soon, asked for a few cache lines at a time between products: memory works while
// the CPU computes, and whoever packs the rows finds them near.
class Upcoming {
 public:
  void start(const Matrix& first, const Matrix& second) {
    matrices_[0] = first;
    matrices_[1] = second;
    place_ = 0;
    row_ = line_ = 0;
  }

  void ask(int lines) {
    while (lines > 0 && place_ < 2) {
      const Matrix& matrix = matrices_[place_];
      const int64_t bytes = matrix.columns * size_of(matrix.type);
      if (row_ >= matrix.rows || matrix.column != size_of(matrix.type)) {
        ++place_;
        row_ = line_ = 0;
        continue;
      }
      const char* row = matrix.at(row_, 0);
      for (; lines > 0 && line_ < bytes; line_ += line_bytes, --lines) prefetch_near(row + line_);
      if (line_ < bytes) return;
      line_ = 0;
      ++row_;
    }
  }

 private:
  Matrix matrices_[2] = {};
  int place_ = 2;
  int64_t row_ = 0;
  int64_t line_ = 0;
};

// As many rows as a vector has lanes, their columns contiguous; null is a row of zeros.
template <class P>
struct RowSources {
  static constexpr int count = lanes<typename P::Unit>;

  const char* rows[count];
  bool all = true;  // none is null

  // Rows first .. of the matrix, as far as they lie below `last`; strided ones are gathered in `copies`.
  void find(const Matrix& matrix, int64_t first, int64_t last, char* copies) {
    const int64_t copy_bytes = matrix.columns * size_of(matrix.type);
    for (int lane = 0; lane < count; ++lane) {
      const int64_t row = first + lane;
      const bool inside = row >= 0 && row < last;
      rows[lane] = inside ? contiguous_row(matrix, row, copies + lane * copy_bytes) : nullptr;
      all = all && inside;
    }
  }
};

// Units unit .. unit + lanes of the rows, transposed: square[i] holds that unit of every row. `ahead` bytes further on,
// what is packed next is asked for: a line for each line of this one, so memory works while this one is transposed.
template <class P>
inline void transpose_units(const Matrix& matrix, const RowSources<P>& sources, int64_t unit, int64_t ahead,
                            Vector<typename P::Unit> (&square)[lanes<typename P::Unit>]) {
  using Unit = typename P::Unit;
  constexpr int count = lanes<Unit>;
  const int64_t element = unit * P::products;
  const int64_t offset = element * size_of(matrix.type);
  const bool are_units = size_of(matrix.type) * P::products == static_cast<int64_t>(sizeof(Unit));
  if (are_units && sources.all && matrix.columns - element >= count * P::products) {
    for (int lane = 0; lane < count; ++lane) prefetch_near(sources.rows[lane] + offset + ahead);
    transpose<Unit>(sources.rows, offset, square);
    return;
  }
  Vector<Unit> rows[count];
  const char* copies[count];
  for (int lane = 0; lane < count; ++lane) {
    const char* row = sources.rows[lane];
    rows[lane] = row ? load_some<P>(matrix.type, row + offset, matrix.columns - element) : Vector<Unit>{};
    copies[lane] = reinterpret_cast<const char*>(&rows[lane]);
  }
  transpose<Unit>(copies, 0, square);
}

// Packs keys first .. first + panel_lanes as [units of d_k][panel_lanes], zeros where a key lies outside [0, rows).
template <class P>
void pack_key_panel(const Matrix& keys, int64_t first, typename P::Unit* panel, char* copies) {
  using Unit = typename P::Unit;
  constexpr int count = lanes<Unit>;
  const int64_t units = units_of<P>(keys.columns);
  for (int group = 0; group < panel_vectors; ++group) {
    RowSources<P> sources;
    sources.find(keys, first + group * count, keys.rows, copies);
    for (int64_t unit = 0; unit < units; unit += count) {
      Vector<Unit> square[count];
      transpose_units<P>(keys, sources, unit, panel_lanes<P> * keys.row, square);
      Unit* target = panel + unit * panel_lanes<P> + group * count;
      const int64_t filled = units - unit < count ? units - unit : count;
      for (int64_t i = 0; i < filled; ++i) store(target + i * panel_lanes<P>, square[i]);
    }
  }
}

// Vectors that hold a strip's rows of one unit, and the rows that they have room for.
template <class P>
constexpr int strip_vectors = (P::strip_rows + lanes<typename P::Unit> - 1) / lanes<typename P::Unit>;
template <class P>
constexpr int gathered_rows = strip_vectors<P> * lanes<typename P::Unit>;

// Packs rows first .. first + count as [units of columns][count], for broadcasting. The last vector of a unit reaches
// into the next unit, which is written after it, and that of the last unit up to a vector past the end.
template <class P>
void pack_strip(const Matrix& matrix, int64_t first, int count, typename P::Unit* target, char* copies) {
  using Unit = typename P::Unit;
  constexpr int width = lanes<Unit>;
  const int64_t units = units_of<P>(matrix.columns);
  const int groups = (count + width - 1) / width;
  const int64_t copy_bytes = width * matrix.columns * size_of(matrix.type);
  RowSources<P> sources[strip_vectors<P>];
  for (int group = 0; group < groups; ++group) {
    sources[group].find(matrix, first + group * width, first + count, copies + group * copy_bytes);
  }
  for (int64_t unit = 0; unit < units; unit += width) {
    Vector<Unit> squares[strip_vectors<P>][width];
    for (int group = 0; group < groups; ++group) transpose_units<P>(matrix, sources[group], unit, 0, squares[group]);
    const int64_t filled = units - unit < width ? units - unit : width;
    for (int64_t i = 0; i < filled; ++i) {
      for (int group = 0; group < groups; ++group) {
        store(target + (unit + i) * count + group * width, squares[group][i]);
      }
    }
  }
}

// Packs rows first .. first + count as they lie, as [panels of columns][units of rows][panel_lanes], panels
// `panel_step` units apart; zeros where a row lies outside.
template <class P>
void pack_rows(const Matrix& matrix, int64_t first, int64_t count, typename P::Unit* packed, int64_t panel_step,
               char* copies) {
  using Unit = typename P::Unit;
  constexpr int vector = lanes<Unit>;
  const int64_t size = size_of(matrix.type);
  const int64_t padded = padded_width<P>(matrix.columns);
  for (int64_t unit = 0; unit < units_of<P>(count); ++unit) {
    const char* sources[P::products];
    for (int product = 0; product < P::products; ++product) {
      const int64_t row = first + unit * P::products + product;
      const bool inside = row >= 0 && row < matrix.rows;
      sources[product] = inside ? contiguous_row(matrix, row, copies + product * matrix.columns * size) : nullptr;
    }
    Unit* target = packed + unit * panel_lanes<P>;
    for (int64_t column = 0; column < padded; column += vector) {
      const int64_t left = matrix.columns - column;
      alignas(64) char partial[P::products][64];
      const char* pieces[P::products];
      bool any = false;
      for (int product = 0; product < P::products; ++product) {
        pieces[product] = left > 0 && sources[product] ? sources[product] + column * size : nullptr;
        if (pieces[product] && left < vector) {
          std::memset(partial[product], 0, sizeof partial[product]);
          std::memcpy(partial[product], pieces[product], static_cast<size_t>(left * size));
          pieces[product] = partial[product];
        }
        any = any || pieces[product];
      }
      store(target + column % panel_lanes<P>, any ? P::join_rows(matrix.type, pieces) : Vector<Unit>{});
      if (column % panel_lanes<P> == panel_lanes<P> - vector) target += panel_step;
    }
  }
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
