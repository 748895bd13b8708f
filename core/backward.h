// The entry points of the backward pass: delta of every row, and one block of keys against all rows of its head.
#pragma once

#include "forward.h"
#include "gradients.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

// Weights and slopes of one strip against one tile of keys; what is not visible is zero.
template <class P>
Visible slope_strip(Meeting<P>& meeting, const Strip& strip, const Tile& tile) {
  using T = typename P::Number;
  GradientScratch<P>& scratch = meeting.scratch;
  const Problem& problem = meeting.problem;
  const Visible visible = see<T>(strip, tile, {scratch.bits + strip.first_row, scratch.bias, scratch.predicted});
  T* weights = scratch.weights + strip.first_row * slope_step;
  T* slopes = scratch.slopes + strip.first_row * slope_step;
  if (!visible.whole) {
    std::memset(weights, 0, static_cast<size_t>(strip.rows * slope_step) * sizeof(T));
    std::memset(slopes, 0, static_cast<size_t>(strip.rows * slope_step) * sizeof(T));
  }
  if (visible.first >= visible.last) {
    for (int row = 0; row < strip.rows; ++row) scratch.bits[strip.first_row + row] = {{0, 0}};
    return visible;
  }
  const T* queries = scratch.query_strips + strip.first_row * problem.width;
  const T* outputs = scratch.output_strips + strip.first_row * problem.value_width;
  const PanelRange seen = panels_of<P>(visible);
  with_panels<P>(strip.rows, seen.first, seen.last, [&](auto rows, auto panels, int64_t panel) {
    constexpr int height = decltype(rows)::count;
    constexpr int at_once = decltype(panels)::count;
    const int64_t place = (tile.index * tile_panels<P> + panel) * panel_lanes<P>;
    score_panels<P, height, slope_step, at_once>(queries, scratch.key_panels + place * problem.width, problem.width,
                                                 static_cast<T>(problem.scale), weights + panel * panel_lanes<P>);
    score_panels<P, height, slope_step, at_once>(outputs, scratch.value_panels + place * problem.value_width,
                                                 problem.value_width, T{1}, slopes + panel * panel_lanes<P>);
  });
  slope_rows(meeting, strip, tile, visible, {seen.first * panel_vectors, seen.last * panel_vectors});
  return visible;
}

// Rows [first, last) of the tile.
struct RowRange {
  int64_t first, last;
};

// The rows that see some of the keys low .. high - 1.
template <class P>
RowRange rows_that_see(const Meeting<P>& meeting, int64_t low, int64_t high) {
  const Bits wanted = range_bits(low, high);
  RowRange range = {0, meeting.rows};
  while (range.first < range.last && !any_bit(meeting.scratch.bits[range.first] & wanted)) ++range.first;
  while (range.first < range.last && !any_bit(meeting.scratch.bits[range.last - 1] & wanted)) --range.last;
  return range;
}

// One panel of packed rows [count][panel_lanes] without the rows that a mask hides; `seen` tells of each.
template <class P, class Seen>
const typename P::Number* clean_rows(Meeting<P>& meeting, const typename P::Number* rows, int64_t count, Seen seen) {
  using T = typename P::Number;
  for (int64_t row = 0; row < count; ++row) {
    T* target = meeting.scratch.clean + row * panel_lanes<P>;
    if (seen(row)) {
      std::memcpy(target, rows + row * panel_lanes<P>, panel_lanes<P> * sizeof(T));
    } else {
      std::memset(target, 0, panel_lanes<P> * sizeof(T));
    }
  }
  return meeting.scratch.clean;
}

// gradient[key] += sum over rows of numbers[row][key] * packed[row], for keys first .. first + height of the tile.
template <class P>
void add_to_keys(Meeting<P>& meeting, const typename P::Number* numbers, const typename P::Number* packed,
                 typename P::Number* gradient, int64_t width, int64_t first, int height, RowRange range,
                 bool carefully) {
  using T = typename P::Number;
  const int64_t count = range.last - range.first;
  const int64_t panel_step = meeting.rows * panel_lanes<P>;
  const T* a = numbers + range.first * slope_step + first;
  const T* rows = packed + range.first * panel_lanes<P>;
  T* target = gradient + first * width;
  if (!carefully) {
    with_panels<P>(height, 0, width / panel_lanes<P>, [&](auto keys, auto panels, int64_t panel) {
      add_panels<P, decltype(keys)::count, 1, slope_step, decltype(panels)::count>(
          a, rows + panel * panel_step, panel_step, count, target + panel * panel_lanes<P>, width);
    });
    return;
  }
  for (int64_t panel = 0; panel < width / panel_lanes<P>; ++panel) {
    for (int key = 0; key < height; ++key) {
      const T* clean = clean_rows(meeting, rows + panel * panel_step, count, [&](int64_t row) {
        return bit_at(meeting.scratch.bits[range.first + row], first + key);
      });
      add_panels<P, 1, 1, slope_step>(a + key, clean, 0, count, target + key * width + panel * panel_lanes<P>, width);
    }
  }
}

// gradient[row] += sum over the tile's visible keys of slopes[row][key] * key.
template <class P>
void add_to_queries(Meeting<P>& meeting, const Strip& strip, const Tile& tile, const Visible& visible,
                    typename P::Number* gradient, bool carefully) {
  using T = typename P::Number;
  const int64_t count = visible.last - visible.first;
  const int64_t panel_step = block_keys * panel_lanes<P>;
  const T* a = meeting.scratch.slopes + strip.first_row * slope_step + visible.first;
  const T* keys = meeting.scratch.key_rows + (tile.index * tile_keys + visible.first) * panel_lanes<P>;
  T* target = gradient + strip.first_row * meeting.width;
  if (!carefully) {
    with_panels<P>(strip.rows, 0, meeting.width / panel_lanes<P>, [&](auto rows, auto panels, int64_t panel) {
      add_panels<P, decltype(rows)::count, slope_step, 1, decltype(panels)::count>(
          a, keys + panel * panel_step, panel_step, count, target + panel * panel_lanes<P>, meeting.width);
    });
    return;
  }
  for (int64_t panel = 0; panel < meeting.width / panel_lanes<P>; ++panel) {
    for (int row = 0; row < strip.rows; ++row) {
      const Bits bits = meeting.scratch.bits[strip.first_row + row];
      const T* clean = clean_rows(meeting, keys + panel * panel_step, count,
                                  [&](int64_t key) { return bit_at(bits, visible.first + key); });
      add_panels<P, 1, slope_step, 1>(a + row * slope_step, clean, 0, count,
                                      target + row * meeting.width + panel * panel_lanes<P>, meeting.width);
    }
  }
}

// One tile of keys against the tile of rows: weights and slopes, then the three sums.
template <class P>
void differentiate_tile(Meeting<P>& meeting, const Tile& tile, typename P::Number* query_sums) {
  bool seen = false;
  bool whole = true;
  const bool finite = meeting.block_finite && meeting.tile_finite;
  const int64_t strips = strips_of(meeting.rows, strip_rows);
  for (int64_t index = 0; index < strips; ++index) {
    const Strip strip = strip_at(meeting.problem, meeting.item, meeting.rows, strip_rows, index);
    meeting.upcoming.ask(lines_at_once);
    const Visible visible = slope_strip(meeting, strip, tile);
    seen = seen || visible.first < visible.last;
    whole = whole && visible.whole;
    if (visible.first < visible.last && meeting.gradients.query.data) {
      add_to_queries(meeting, strip, tile, visible, query_sums, !finite && !visible.whole);
    }
  }
  if (!seen) return;
  const int64_t key_strips = strips_of(tile_keys, strip_rows);
  for (int64_t index = 0; index < key_strips; ++index) {
    const Strip keys = strip_at(meeting.problem, meeting.item, tile_keys, strip_rows, index);
    const RowRange range =
        whole ? RowRange{0, meeting.rows} : rows_that_see(meeting, keys.first_row, keys.first_row + keys.rows);
    if (range.first >= range.last) continue;
    GradientScratch<P>& scratch = meeting.scratch;
    meeting.upcoming.ask(lines_at_once);
    const int64_t first = tile.index * tile_keys;
    const bool carefully = !finite && !whole;
    if (meeting.gradients.value.data) {
      add_to_keys(meeting, scratch.weights, scratch.output_rows, scratch.value_gradient + first * meeting.value_width,
                  meeting.value_width, keys.first_row, keys.rows, range, carefully);
    }
    if (meeting.gradients.key.data) {
      add_to_keys(meeting, scratch.slopes, scratch.query_rows, scratch.key_gradient + first * meeting.width,
                  meeting.width, keys.first_row, keys.rows, range, carefully);
    }
  }
}

// The next block from `block` on that the item sees something of; past the last block where there is none.
inline int64_t next_block(const Problem& problem, const Item& item, int64_t block) {
  const int64_t end = block_of(problem.key_start + problem.keys - 1) + 1;
  while (block < end && label_of_block(problem, item, block) == Label::empty) ++block;
  return block;
}

template <class P>
void store_gradient_rows(const Matrix& target, const typename P::Number* rows, int64_t first, int64_t count,
                         int64_t step) {
  for (int64_t row = 0; row < count; ++row) {
    char* place = const_cast<char*>(target.at(first + row, 0));
    store_numbers(target.type, target.column, place, rows + row * step, target.columns);
  }
}

// Where the sums of an item's query gradients are kept.
template <class P>
typename P::Number* query_sums_of(const Meeting<P>& meeting) {
  const Problem& problem = meeting.problem;
  const int64_t group = problem.query_heads / problem.key_heads;
  const int64_t head = meeting.item.batch * problem.key_heads + meeting.item.key_head;
  auto* sums = reinterpret_cast<typename P::Number*>(meeting.gradients.query_sums);
  return sums + (head * problem.queries + meeting.item.first_query) * group * meeting.width;
}

// The rows of a tile that comes next.
template <class P>
void ask_for_tile(Meeting<P>& meeting, int64_t tile_of_rows) {
  const Problem& problem = meeting.problem;
  Item item = meeting.item;
  item.first_query = tile_of_rows * gradient_queries(problem);
  item.queries = smaller(gradient_queries(problem), problem.queries - item.first_query);
  meeting.upcoming.start(query_matrix(problem, item, problem.query, problem.width),
                         query_matrix(problem, item, meeting.gradients.output_slope, problem.value_width));
}

// One tile of rows: waits for its turn, adds this block's part, and hands the turn on.
template <class P>
void meet(Meeting<P>& meeting, int64_t tile_of_rows, int64_t tiles_of_rows) {
  const Problem& problem = meeting.problem;
  const int64_t head = meeting.item.batch * problem.key_heads + meeting.item.key_head;
  int64_t* turn = meeting.gradients.turns + head * tiles_of_rows + tile_of_rows;
  pack_tile(meeting);
  if (tile_of_rows + 1 < tiles_of_rows) ask_for_tile(meeting, tile_of_rows + 1);
  while (__atomic_load_n(turn, __ATOMIC_ACQUIRE) != meeting.block) {
    // Who failed (a predicate that raised, no memory) hands on no turn: whoever waits gives up too.
    if (problem.stopped(problem.context) || !meeting.gradients.wait(meeting.gradients.wait_context)) return;
  }
  typename P::Number* sums = query_sums_of(meeting);
  for (int64_t index = 0; index < block_tiles; ++index) {
    const Tile tile = tile_at(problem, meeting.block, index);
    if (tile.low < tile.high) differentiate_tile(meeting, tile, sums);
  }
  const int64_t next = next_block(problem, meeting.item, meeting.block + 1);
  if (next > block_of(problem.key_start + problem.keys - 1) && meeting.gradients.query.data) {
    const Matrix target = query_matrix(problem, meeting.item, meeting.gradients.query, problem.width);
    store_gradient_rows<P>(target, sums, 0, meeting.rows, meeting.width);
  }
  __atomic_store_n(turn, next, __ATOMIC_RELEASE);
}

template <class P>
void differentiate(const Problem& problem, const Gradients& gradients, int64_t batch, int64_t key_head, int64_t block,
                   char* memory) {
  const SubnormalsAreZero mode;
  const int64_t queries = gradient_queries(problem);
  const int64_t tiles = gradient_tiles(problem);
  Meeting<P> meeting(problem, gradients, {batch, key_head, 0, 0}, block, Carver(memory));
  pack_block(meeting);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    meeting.item.first_query = tile * queries;
    meeting.item.queries = smaller(queries, problem.queries - tile * queries);
    if (label_of_block(problem, meeting.item, block) == Label::empty) continue;
    if (problem.predicates && !predict(problem, meeting.item, block, meeting.scratch)) return;
    meet(meeting, tile, tiles);
  }
  const int64_t first = block * block_keys - problem.key_start;
  const int64_t low = larger(0, first);
  const int64_t count = smaller(problem.keys, first + block_keys) - low;
  const Matrix keys = key_matrix(problem, meeting.item, gradients.key, problem.width);
  const Matrix values = key_matrix(problem, meeting.item, gradients.value, problem.value_width);
  const int64_t skipped = low - first;
  if (keys.data) {
    store_gradient_rows<P>(keys, meeting.scratch.key_gradient + skipped * meeting.width, low, count, meeting.width);
  }
  if (values.data) {
    store_gradient_rows<P>(values, meeting.scratch.value_gradient + skipped * meeting.value_width, low, count,
                           meeting.value_width);
  }
}

// For one tile of rows: delta = rowsum(dout * out) - dlse, and the block whose turn comes first.
template <class P>
void start_gradients(const Problem& problem, const Gradients& gradients, const Item& item, char* memory) {
  using T = typename P::Number;
  const SubnormalsAreZero mode;
  const Matrix outputs = query_matrix(problem, item, gradients.output, problem.value_width);
  const Matrix slopes = query_matrix(problem, item, gradients.output_slope, problem.value_width);
  const int64_t copy_bytes = problem.value_width * 8;
  for (int64_t row = 0; row < outputs.rows; ++row) {
    const char* output = contiguous_row(outputs, row, memory);
    const char* slope = contiguous_row(slopes, row, memory + copy_bytes);
    Vector<T> products = {};
    for (int64_t column = 0; column < problem.value_width; column += lanes<T>) {
      const int64_t left = problem.value_width - column;
      products = fma(load_some<P>(outputs.type, output + column * size_of(outputs.type), left),
                     load_some<P>(slopes.type, slope + column * size_of(slopes.type), left), products);
    }
    const int64_t place = row_place(problem, item, row);
    const double lse_slope = gradients.lse_slope ? gradients.lse_slope[place] : 0.0;
    gradients.delta[place] = static_cast<double>(sum_of<T>(products)) - lse_slope;
  }
  const int64_t tiles = gradient_tiles(problem);
  const int64_t head = item.batch * problem.key_heads + item.key_head;
  gradients.turns[head * tiles + item.first_query / gradient_queries(problem)] =
      next_block(problem, item, block_of(problem.key_start));
}

template <class P>
int64_t gradient_scratch_bytes(const Problem& problem) {
  Carver carver(nullptr);
  GradientScratch<P> scratch(problem, carver);
  return carver.bytes();
}

template <class P>
int64_t query_sum_bytes(const Problem& problem) {
  return padded_width<P>(problem.width) * static_cast<int64_t>(sizeof(typename P::Number));
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
