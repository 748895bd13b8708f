// The backward pass in one sweep: for one block of keys against all rows of its head, weights are computed again from
// the row's largest score and its weight, and five products make the gradients. The sums of a key's gradients run over
// ascending rows, those of a query's over ascending keys: blocks take turns at each tile of rows, so the bits do not
// depend on the threads.
#pragma once

#include "product.h"
#include "sight.h"
#include "workspace.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

constexpr int64_t gradient_rows = 128;  // rows of a tile, unless a group is larger
// Rows of a tile of weights lie nine cache lines apart, so that its columns do not meet in a few sets of the cache.
constexpr int slope_step = static_cast<int>(tile_keys) + 16;

inline int64_t gradient_queries(const Problem& problem) {
  return larger(1, gradient_rows / (problem.query_heads / problem.key_heads));
}
inline int64_t gradient_tiles(const Problem& problem) {
  return (problem.queries + gradient_queries(problem) - 1) / gradient_queries(problem);
}
inline int64_t most_gradient_rows(const Problem& problem) {
  return smaller(gradient_queries(problem), problem.queries) * (problem.query_heads / problem.key_heads);
}

template <class P>
struct GradientScratch {
  using T = typename P::Number;

  // Of the block of keys.
  T* key_panels;      // [panels of keys][d_k][panel_lanes]
  T* value_panels;    // [panels of keys][d_v][panel_lanes]
  T* key_rows;        // [panels of d_k][block_keys][panel_lanes]
  T* key_gradient;    // [block_keys][padded d_k]
  T* value_gradient;  // [block_keys][padded d_v]
  // Of the tile of rows.
  T* query_strips;   // strip after strip, each [d_k][rows of the strip]
  T* output_strips;  // the same of dout
  T* query_rows;     // [panels of d_k][rows][panel_lanes]
  T* output_rows;    // [panels of d_v][rows][panel_lanes]
  T* top;            // [rows]
  T* share;          // [rows]
  T* delta;          // [rows]
  // Of one tile of keys.
  T* weights;  // [rows][slope_step]
  T* slopes;   // [rows][slope_step]
  Bits* bits;  // [rows]
  T* bias;     // [strip_rows][tile_keys]
  T* clean;    // [rows or tile_keys][panel_lanes]
  char* copies;
  uint64_t* predicted;
  int64_t* heads;
  int64_t* positions;

  GradientScratch(const Problem& problem, Carver& carver) {
    const int64_t rows = most_gradient_rows(problem);
    const int64_t width = padded_width<P>(problem.width);
    const int64_t value_width = padded_width<P>(problem.value_width);
    key_panels = carver.take<T>(block_keys * problem.width);
    value_panels = carver.take<T>(block_keys * problem.value_width);
    key_rows = carver.take<T>(block_keys * width);
    key_gradient = carver.take<T>(block_keys * width);
    value_gradient = carver.take<T>(block_keys * value_width);
    query_strips = carver.take<T>(rows * problem.width + lanes<T>);
    output_strips = carver.take<T>(rows * problem.value_width + lanes<T>);
    query_rows = carver.take<T>(rows * width);
    output_rows = carver.take<T>(rows * value_width);
    top = carver.take<T>(rows);
    share = carver.take<T>(rows);
    delta = carver.take<T>(rows);
    weights = carver.take<T>(rows * slope_step);
    slopes = carver.take<T>(rows * slope_step);
    bits = carver.take<Bits>(rows);
    bias = carver.take<T>(problem.bias.data ? strip_rows * tile_keys : 0);
    clean = carver.take<T>(larger(rows, tile_keys) * panel_lanes<P>);
    copies = carver.take<char>(gathered_rows<P> * 8 * larger(problem.width, problem.value_width));
    predicted = carver.take<uint64_t>(problem.predicates * rows * (block_keys / 64));
    heads = carver.take<int64_t>(problem.predicates ? rows : 0);
    positions = carver.take<int64_t>(problem.predicates ? rows : 0);
  }
};

// Where a row of an item is kept in arrays [batch, query_heads, queries].
inline int64_t row_place(const Problem& problem, const Item& item, int64_t row) {
  const int64_t group = problem.query_heads / problem.key_heads;
  const int64_t head = item.key_head * group + row % group;
  return (item.batch * problem.query_heads + head) * problem.queries + item.first_query + row / group;
}

// One block of keys meeting one tile of rows.
template <class P>
struct Meeting {
  using T = typename P::Number;

  const Problem& problem;
  const Gradients& gradients;
  Item item;
  int64_t block;
  GradientScratch<P> scratch;
  int64_t width, value_width;  // padded
  int64_t rows = 0;
  bool block_finite = true;
  bool tile_finite = true;
  Upcoming upcoming;  // rows of the next tile

  Meeting(const Problem& problem_, const Gradients& gradients_, const Item& item_, int64_t block_, Carver carver)
      : problem(problem_),
        gradients(gradients_),
        item(item_),
        block(block_),
        scratch(problem_, carver),
        width(padded_width<P>(problem_.width)),
        value_width(padded_width<P>(problem_.value_width)) {}
};

template <class P>
void pack_block(Meeting<P>& meeting) {
  const Problem& problem = meeting.problem;
  GradientScratch<P>& scratch = meeting.scratch;
  const Matrix keys = key_matrix(problem, meeting.item, problem.key, problem.width);
  const Matrix values = key_matrix(problem, meeting.item, problem.value, problem.value_width);
  const int64_t first = meeting.block * block_keys - problem.key_start;
  for (int64_t panel = 0; panel < block_keys / panel_lanes<P>; ++panel) {
    const int64_t key = first + panel * panel_lanes<P>;
    pack_key_panel<P>(keys, key, scratch.key_panels + panel * panel_lanes<P> * problem.width, scratch.copies);
    pack_key_panel<P>(values, key, scratch.value_panels + panel * panel_lanes<P> * problem.value_width, scratch.copies);
  }
  pack_rows<P>(keys, first, block_keys, scratch.key_rows, block_keys * panel_lanes<P>, scratch.copies);
  meeting.block_finite = all_finite(scratch.key_panels, block_keys * problem.width) &&
                         all_finite(scratch.value_panels, block_keys * problem.value_width);
  using T = typename P::Number;
  std::memset(scratch.key_gradient, 0, static_cast<size_t>(block_keys * meeting.width) * sizeof(T));
  std::memset(scratch.value_gradient, 0, static_cast<size_t>(block_keys * meeting.value_width) * sizeof(T));
}

// Packs the item's rows both ways: for broadcasting (strips) and as panels.
template <class P>
void pack_tile(Meeting<P>& meeting) {
  using T = typename P::Number;
  const Problem& problem = meeting.problem;
  GradientScratch<P>& scratch = meeting.scratch;
  const Matrix queries = query_matrix(problem, meeting.item, problem.query, problem.width);
  const Matrix outputs = query_matrix(problem, meeting.item, meeting.gradients.output_slope, problem.value_width);
  meeting.rows = queries.rows;
  for (int64_t index = 0; index < strips_of(meeting.rows, strip_rows); ++index) {
    const Strip strip = strip_at(problem, meeting.item, meeting.rows, strip_rows, index);
    pack_strip<P>(queries, strip.first_row, strip.rows, scratch.query_strips + strip.first_row * problem.width,
                  scratch.copies);
    pack_strip<P>(outputs, strip.first_row, strip.rows, scratch.output_strips + strip.first_row * problem.value_width,
                  scratch.copies);
  }
  pack_rows<P>(queries, 0, meeting.rows, scratch.query_rows, meeting.rows * panel_lanes<P>, scratch.copies);
  pack_rows<P>(outputs, 0, meeting.rows, scratch.output_rows, meeting.rows * panel_lanes<P>, scratch.copies);
  meeting.tile_finite = all_finite(scratch.query_rows, meeting.rows * meeting.width) &&
                        all_finite(scratch.output_rows, meeting.rows * meeting.value_width);
  for (int64_t row = 0; row < meeting.rows; ++row) {
    const int64_t place = row_place(problem, meeting.item, row);
    const double top = meeting.gradients.top[place];
    // An empty row's scores are all hidden; any finite number gives them the weight 0.
    scratch.top[row] = top == -Constants<double>::infinity ? T{0} : static_cast<T>(top);
    scratch.share[row] = static_cast<T>(meeting.gradients.share[place]);
    scratch.delta[row] = static_cast<T>(meeting.gradients.delta[place]);
  }
}

// Adds one row's slopes to the gradient of the bias.
template <class P>
void add_bias_gradient(Meeting<P>& meeting, const Strip& strip, int row, const Tile& tile, VectorRange range,
                       const typename P::Number* slopes) {
  using T = typename P::Number;
  const Tensor& bias = meeting.gradients.bias;
  char* target = bias.data + batch_offset(meeting.problem, bias, meeting.item.batch) + strip.head(row) * bias.head +
                 strip.query(row) * bias.row + tile.first_key * bias.column;
  const int64_t low = larger(tile.low, range.first * lanes<T>);
  const int64_t high = smaller(tile.high, range.last * lanes<T>);
  for (int64_t key = low; key < high; ++key) {
    T* number = reinterpret_cast<T*>(target + key * bias.column);
    *number += slopes[key];
  }
}

// From scores and products of dout with the values to weights and slopes (the gradient of the scaled scores), in place.
template <class P>
void slope_rows(Meeting<P>& meeting, const Strip& strip, const Tile& tile, const Visible& visible, VectorRange range) {
  using T = typename P::Number;
  const T softcap = static_cast<T>(meeting.problem.softcap);
  const Vector<T> scale = splat(static_cast<T>(meeting.problem.scale));
  const bool has_bias = meeting.problem.bias.data != nullptr;
  for (int row = 0; row < strip.rows; ++row) {
    const int64_t place = strip.first_row + row;
    T* weights = meeting.scratch.weights + place * slope_step;
    T* slopes = meeting.scratch.slopes + place * slope_step;
    const T* bias = meeting.scratch.bias + row * tile_keys;
    const Bits bits = meeting.scratch.bits[place];
    const Vector<T> top = splat(meeting.scratch.top[place]);
    const Vector<T> share = splat(meeting.scratch.share[place]);
    const Vector<T> delta = splat(meeting.scratch.delta[place]);
    for (int64_t v = range.first; v < range.last; ++v) {
      const int64_t key = v * lanes<T>;
      Vector<T> s = load(weights + key);
      Vector<T> steepness = splat(T{1});
      if (softcap > 0) {
        s = capped(s, softcap);
        steepness -= s / splat(softcap) * (s / splat(softcap));
      }
      if (has_bias) s += load(bias + key);
      // Not e^(s - lse): beside a large score lse cannot hold the logarithm of the sum.
      Vector<T> p = exp_nonpositive<T>(s - top) * share;
      Vector<T> slope = p * (load(slopes + key) - delta);
      if (!visible.whole) {
        const auto here = static_cast<uint32_t>(bits.word[key >> 6] >> (key & 63));
        p = select<T>(here, p, Vector<T>{});
        slope = select<T>(here, slope, Vector<T>{});
        steepness = select<T>(here, steepness, Vector<T>{});
      }
      store(weights + key, p);
      if (meeting.gradients.bias.data) {
        store(slopes + key, slope);  // the bias is added after softcap and scale, so this is its own slope
        add_bias_gradient(meeting, strip, row, tile, {v, v + 1}, slopes);
      }
      store(slopes + key, slope * steepness * scale);
    }
  }
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
