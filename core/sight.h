// What one strip of rows sees of one tile of keys, from the mask and from -inf in the bias, before any key is read.
#pragma once

#include "elementary.h"
#include "tiles.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

// The part of a tile that some row of a strip can see: keys [first, last), all of them by every row if `whole`.
struct Visible {
  int64_t first, last;
  bool whole;
};

// What one strip sees of one tile: the rows' bits, and their biases.
template <class T>
struct Sight {
  Bits* bits;                 // [strip_rows]
  T* bias;                    // [strip_rows][tile_keys]
  const uint64_t* predicted;  // [predicates][rows of the item][block_keys / 64]
};

// Numbers `step` bytes apart, widened: by whole vectors where they touch.
template <class T>
inline void read_numbers(Type type, const char* source, int64_t step, int64_t count, T* target) {
  int64_t i = 0;
  if (step == size_of(type) && (type == Type::float64) == (sizeof(T) == 8)) {
    for (; i + lanes<T> <= count; i += lanes<T>) store(target + i, Plain<T>::load_units(type, source + i * step));
  }
  for (; i < count; ++i) target[i] = number_at<T>(type, source + i * step);
}

template <class T>
void load_bias(const Strip& strip, const Tile& tile, T* target) {
  const Tensor& bias = strip.problem->bias;
  const char* data = bias.data + batch_offset(*strip.problem, bias, strip.item->batch) + tile.first_key * bias.column;
  const bool is_whole = tile.high - tile.low == tile_keys;
  for (int row = 0; row < strip.rows; ++row, target += tile_keys) {
    const char* source = data + strip.head(row) * bias.head + strip.query(row) * bias.row;
    if (!is_whole) std::memset(target, 0, tile_keys * sizeof(T));
    read_numbers(bias.type, source + tile.low * bias.column, bias.column, tile.high - tile.low, target + tile.low);
  }
}

template <class T>
inline Bits bits_not_hidden(const T* bias) {
  Bits bits = {{0, 0}};
  for (int64_t key = 0; key < tile_keys; key += lanes<T>) {
    const uint32_t kept = lanes_where<T>(load(bias + key) != splat(-Constants<T>::infinity));
    bits.word[key >> 6] |= uint64_t{kept} << (key & 63);
  }
  return bits;
}

// Decides what the strip sees of the tile and writes one bit a key for every row, from the mask and from -inf in the
// bias.
template <class T>
Visible see(const Strip& strip, const Tile& tile, const Sight<T>& sight) {
  const Problem& problem = *strip.problem;
  const int64_t group = strip.group();
  const int64_t first_query = strip.item->first_query + strip.first_row / group;
  const int64_t last_query = strip.item->first_query + (strip.first_row + strip.rows - 1) / group;
  const Band queries = query_hull(problem, first_query, last_query - first_query + 1);
  const Label label = label_of(problem, {strip.item->batch, queries.low, queries.high, tile.first_key + tile.low,
                                         tile.first_key + tile.high - 1});
  if (label == Label::empty) return {0, 0, false};
  const bool has_bias = problem.bias.data != nullptr;
  if (label == Label::full && !has_bias && tile.high - tile.low == tile_keys) {
    for (int row = 0; row < strip.rows; ++row) sight.bits[row] = range_bits(0, tile_keys);
    return {0, tile_keys, true};
  }
  if (has_bias) load_bias(strip, tile, sight.bias);
  Bits any = {{0, 0}};
  Bits all = {{~uint64_t{0}, ~uint64_t{0}}};
  for (int row = 0; row < strip.rows; ++row) {
    Bits bits = label == Label::full ? range_bits(tile.low, tile.high) : row_bits(strip, row, tile, sight.predicted);
    if (has_bias) bits = bits & bits_not_hidden(sight.bias + row * tile_keys);
    sight.bits[row] = bits;
    any = any | bits;
    all = all & bits;
  }
  if (!any_bit(any)) return {0, 0, false};
  return {first_bit(any), last_bit(any) + 1, !any_bit(~all)};
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
