// How the pages of a cache lie where they differ from what the products compute with: halves that are widened as they
// are read, and integer codes. Queries and weights meet codes as integers too, of 16 bits or of 8, with one scale a row
// (weights: a row and a tile), so the sums are exact, and the scale of each key or value comes in once, beside them.
#pragma once

#include "integers.h"
#include "product.h"
#include "sight.h"
#include "workspace.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

// What stands for a half in a page.
struct Float16 {
  uint16_t bits;
};
struct Bfloat16Half {
  uint16_t bits;
};
inline Vector<float> widened(const Float16* source) { return load_float16(reinterpret_cast<const char*>(source)); }
inline Vector<float> widened(const Bfloat16Half* source) {
  return load_bfloat16(reinterpret_cast<const char*>(source));
}

// The arithmetic of float, over pages of halves.
template <class Half>
struct Widened : Plain<float> {
  using Stored = Half;
  using InRegisters::load_stored;  // of what was cleaned

  static Vector<float> load_stored(const Half* source) { return widened(source); }
};

// Weights stay floats over the scores until they are coded, a tile at a time.
struct Coded : InRegisters {
  using Number = float;
  using Sum = int32_t;
  using Unit = uint32_t;
  static constexpr bool coded = true;
  static constexpr bool weights_over_scores = true;

  static void store_weights(Unit* row, int64_t key, Vector<float> weights) {
    store(reinterpret_cast<float*>(row) + key, weights);
  }
};

// Codes meet those of queries and weights in pairs of 16-bit integers.
struct Int8 : Coded {
  using Stored = uint16_t;  // a pair of codes
  using Query = int16_t;
  using Weight = int16_t;
  using Keys = Int8;  // the product with keys, and with values
  using Values = Int8;
  static constexpr Type type = Type::int8;
  static constexpr int products = 2;
  static constexpr int largest_weight = INT16_MAX;
  static constexpr bool grouped = false;   // whether the columns of a key may have several scales
  static constexpr int added_to_keys = 0;  // in the product
  static constexpr int value_step = 1;     // of one code in the product
  static_assert(INT32_MAX / (127 * tile_keys) > INT16_MAX);

  // Whose sum over so many columns stays below 2^31.
  static int64_t largest_query(int64_t columns) {
    return smaller(INT16_MAX, INT32_MAX / (largest_code(type) * larger(1, columns)));
  }
  static constexpr int place(int64_t i) { return static_cast<int>(8 * i); }

  static Vector<Unit> load_stored(const Stored* source) { return load_int8(reinterpret_cast<const char*>(source)); }
  static Vector<int32_t> multiply_add(Unit a, Vector<Unit> b, Vector<int32_t> c) { return dot_int16(splat(a), b, c); }
};

// Codes meet those of queries and weights in fours of 8-bit integers: bytes as coarse as these cost the result little
// beside what four bits of a key and a value do, and half the instructions.
struct Int4Keys;
struct Int4Values;
struct Int4 : Coded {
  using Stored = uint32_t;  // eight codes
  using Query = int8_t;
  using Weight = uint8_t;
  using Keys = Int4Keys;
  using Values = Int4Values;
  static constexpr Type type = Type::int4;
  static constexpr int products = 4;
  static constexpr int units_together = 2;
  static constexpr int units_loaded = 2;
  static constexpr int largest_weight = UINT8_MAX;
  static constexpr bool grouped = true;
  static constexpr int added_to_keys = 8;
  static constexpr int value_step = nibble_step;
  // A vector of stored units stays in its register beside the operand that is made of it, and so do the masks.
  static constexpr int pair_rows = SOFTLOOKUP_ISA::pair_rows > 0 ? SOFTLOOKUP_ISA::pair_rows - 1 : 0;
  static constexpr int most_rows = (registers - 1) / panel_vectors - 3;
  static constexpr int strip_rows = most_rows < SOFTLOOKUP_ISA::strip_rows ? most_rows : SOFTLOOKUP_ISA::strip_rows;

  static int64_t largest_query(int64_t) { return INT8_MAX; }
  static constexpr int place(int64_t i) { return nibble_place(i); }
};
struct Int4Keys : Int4 {
  static constexpr int pair_rows = Int4::pair_rows / 2;  // beside each sum lies the total of the groups
  static Vector<Unit> unit_of(Vector<Unit> stored, int i) { return unsigned_nibbles(stored, i); }
  static Vector<int32_t> multiply_add(Unit a, Vector<Unit> b, Vector<int32_t> c) { return dot_bytes(b, splat(a), c); }
};
struct Int4Values : Int4 {
  static Vector<Unit> unit_of(Vector<Unit> stored, int i) { return signed_nibbles(stored, i); }
  static Vector<int32_t> multiply_add(Unit a, Vector<Unit> b, Vector<int32_t> c) { return dot_bytes(splat(a), b, c); }
};

// From one stored unit of a panel to the next: units of the products come `units_loaded` at a time.
template <class P>
inline int64_t stored_units(int64_t units) {
  return units / P::units_loaded;
}

template <class P>
constexpr PanelLayout panel_layout = {panel_lanes<P>, P::products * P::units_loaded,
                                      static_cast<int64_t>(sizeof(typename P::Stored)),
                                      P::units_together / P::units_loaded};

// The largest of the lanes, none of them NaN.
struct Greater {
  template <class V>
  static V apply(V a, V b) {
    return a > b ? a : b;
  }
};
inline float largest_of(Vector<float> value) { return reduce<Greater, float, vector_bytes>(value); }

// By what numbers up to `top` are multiplied to become codes up to `largest`, and what one of the `parts` of a code is
// then worth. Numbers whose steps would be subnormal are zero.
struct Steps {
  Vector<float> factor, worth;

  Steps(Vector<float> top, float largest, float parts = 1) {
    const float whole = largest * parts;
    const auto counts = top > splat(Constants<float>::smallest * whole);
    factor = counts ? splat(largest) / top : Vector<float>{};
    worth = counts ? top / splat(whole) : Vector<float>{};
  }
};

// The queries of a strip as codes.
template <class P>
struct QueryCodes {
  const typename P::Unit* units;  // [units of d_k][rows]
  const int32_t* start;           // [groups][rows] where the sums of their products start
  const float* worth;             // [rows] of the product of one code of a query and one of a key
  const float* offset;            // [rows] what the means of the keys add to every score
  int64_t depth;                  // units of d_k
  int64_t group;                  // units that share a scale of the key
};

// Scores of `height` rows against packed panels of codes: the exact sums of every group of columns, times the group's
// scale, are added up. `scale` is that of the panels' first key, groups tile_keys apart.
template <class P, int height, int step, int panels, bool asks>
void score_codes(const QueryCodes<P>& queries, const typename P::Stored* keys, const float* scale, float* scores,
                 int64_t ahead) {
  Panels<typename P::Stored> b = {keys, panel_lanes<P>, stored_units<P>(queries.depth) * panel_lanes<P>};
  Vector<float> totals[height][panels * panel_vectors] = {};
  const typename P::Unit* units = queries.units;
  const int32_t* start = queries.start;
  int64_t left = queries.depth;
  do {
    const int64_t depth = P::grouped ? smaller(left, queries.group) : left;
    multiply_cut<typename P::Keys, height, panels, 1, height, asks>(
        units, b, depth, ahead, [&](int row, int) { return splat(start[row]); },
        [&](int row, int v, Vector<int32_t> sum) {
          totals[row][v] = fma(floats_of(sum), load(scale + v * lanes<float>), totals[row][v]);
        });
    left -= depth;
    units += depth * height;
    start += height;
    scale += tile_keys;
    b.units += stored_units<P>(depth) * b.step;
  } while (P::grouped && left > 0);
#pragma GCC unroll 12
  for (int row = 0; row < height; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < panels * panel_vectors; ++v) {
      store(scores + row * step + v * lanes<float>,
            fma(totals[row][v], splat(queries.worth[row]), splat(queries.offset[row])));
    }
  }
}

// accumulator[row] = accumulator[row] * rescale[row] + weight_scale[row] * codes of weights times codes of values.
template <class P, int height, int panels, bool asks>
void weigh_codes(const typename P::Unit* weights, const Panels<typename P::Stored>& values, int64_t units,
                 const float* rescale, const float* weight_scale, float* accumulator, int64_t accumulator_step,
                 int64_t ahead) {
  multiply_cut<typename P::Values, height, panels, tile_units<P>, 1, asks>(
      weights, values, units, ahead, [](int, int) { return Vector<int32_t>{}; },
      [&](int row, int v, Vector<int32_t> sum) {
        float* target = accumulator + row * accumulator_step + v * lanes<float>;
        store(target, fma(floats_of(sum), splat(weight_scale[row]), load(target) * splat(rescale[row])));
      });
}

// Weights of `count` rows of a tile, times the scales of their values, to codes, and what each row's products are
// worth. As many rows at a time as a vector has lanes, so that one reduction serves them all.
template <class P>
void code_weights(const float* weights, const float* value_scale, int64_t first, int64_t last, int count,
                  typename P::Unit* codes, float* worth) {
  Vector<float> tops[lanes<float>] = {};
  for (int row = 0; row < count; ++row) {
    for (int64_t v = first; v < last; ++v) {
      const int64_t key = v * lanes<float>;
      tops[row] = maximum(load(weights + row * tile_keys + key) * load(value_scale + key), tops[row]);
    }
  }
  float highest[lanes<float>];
  reduce_rows<Larger, float>(tops, highest);
  float factor[lanes<float>];
  const Steps steps(load(highest), P::largest_weight, P::value_step);
  store(factor, steps.factor);
  store(worth, steps.worth);
  for (int row = 0; row < count; ++row) {
    auto* target = reinterpret_cast<typename P::Weight*>(codes + row * tile_units<P>);
    for (int64_t v = first; v < last; ++v) {
      const int64_t key = v * lanes<float>;
      const Vector<float> weight = load(weights + row * tile_keys + key) * load(value_scale + key);
      store_codes(target + key, nearest(weight * splat(factor[row])));
    }
  }
}

// Packs a tile's rows of stored units, `units` each, as key panels: a move of whole units.
template <class P>
void pack_unit_rows(const typename P::Stored* rows, int64_t units, typename P::Stored* panels) {
  constexpr auto added = static_cast<typename P::Stored>(P::added_to_keys > 0 ? added_to_nibbles : 0);
  for (int64_t first = 0; first < tile_keys; first += panel_lanes<P>) {
    for (int64_t unit = 0; unit < units; ++unit, panels += panel_lanes<P>) {
      for (int lane = 0; lane < panel_lanes<P>; ++lane) panels[lane] = rows[(first + lane) * units + unit] ^ added;
    }
  }
}

// The code of one column in a row of stored units, as the bits of an unsigned number.
template <class P>
inline uint32_t code_bits(const typename P::Stored* row, int64_t column) {
  constexpr int64_t elements = panel_layout<P>.elements;
  constexpr uint32_t mask = P::type == Type::int8 ? 0xffu : 0xfu;
  return (static_cast<uint32_t>(row[column / elements]) >> P::place(column % elements)) & mask;
}

// Packs the first columns of a tile's rows of key codes as panels of values.
template <class P>
void pack_code_values(const typename P::Stored* rows, int64_t units, int64_t value_width, typename P::Stored* panels) {
  using Stored = typename P::Stored;
  constexpr int64_t elements = panel_layout<P>.elements;
  for (int64_t first = 0; first < padded_width<P>(value_width); first += panel_lanes<P>) {
    for (int64_t key = 0; key < tile_keys; key += elements, panels += panel_lanes<P>) {
      for (int lane = 0; lane < panel_lanes<P>; ++lane) {
        uint32_t unit = 0;
        for (int64_t i = 0; i < elements && first + lane < value_width; ++i) {
          unit |= code_bits<P>(rows + (key + i) * units, first + lane) << P::place(i);
        }
        panels[lane] = static_cast<Stored>(unit);
      }
    }
  }
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
