// The tiled forward pass. For every block of 512 keys and every strip of rows: scores tile by tile, softmax, weighted
// sum, into a partial result that starts empty; then the partial is folded into the item's state. What a row computes
// depends on nothing but its own query and the keys visible to it (the bits rule in the numerics policy).
#pragma once

#include "amx.h"
#include "product.h"
#include "sight.h"
#include "softmax.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

// Consecutive strips that share a pass over a tile.
template <class P>
struct Stack {
  int count;
  Strip strips[P::stack_strips];
  int64_t first_row;  // within the item
  int64_t rows;

  int64_t place(const Strip& strip) const { return strip.first_row - first_row; }
};

constexpr int lines_at_once = 12;  // of what is needed next, asked for before each strip's products

// What one call of `attend` works with.
template <class P>
struct Run {
  using T = typename P::Number;
  using Unit = typename P::Unit;

  const Problem& problem;
  const Item& item;
  Carver carver;
  int64_t rows;
  Scratch<P> scratch;
  Matrix keys;
  Matrix values;
  int64_t units;  // of d_k
  T scale;        // of the products of queries and keys, as they are packed
  int64_t strips;
  T* scores;  // of the current tile, as the three that follow
  Unit* weights;
  Bits* bits;
  Visible* visible;      // by the strips of the current stack
  bool values_in_place;  // values are read where they lie
  Upcoming upcoming;     // keys and values of the next block
  int64_t block = 0;     // absolute index of the current block
  Products<P> products;
  Visible seen[tiles_at_once<P>][P::stack_strips] = {};
  uint64_t packed_panels[block_tiles] = {};
  bool packed_values[block_tiles] = {};

  Run(const Problem& problem_, const Item& item_, char* memory)
      : problem(problem_),
        item(item_),
        carver(memory),
        rows(item_.queries * (problem_.query_heads / problem_.key_heads)),
        scratch(problem_, rows, carver),
        keys(key_matrix(problem_, item_, problem_.key, problem_.width)),
        values(key_matrix(problem_, item_, problem_.value, problem_.value_width)),
        units(units_of<P>(problem_.width)),
        scale(static_cast<T>(problem_.scale)),
        strips(strips_of(rows, P::strip_rows)) {
    look_at(0);
    // A single strip reads each value once: a copy would only cost. The row stride must be a whole number of units.
    values_in_place = strips == 1 && P::products == 1 && size_of(values.type) == sizeof(T) &&
                      values.column == sizeof(T) && values.row % static_cast<int64_t>(sizeof(T)) == 0 &&
                      values.columns % panel_lanes<P> == 0;
  }

  Strip strip(int64_t index) const { return strip_at(problem, item, rows, P::strip_rows, index); }
  Stack<P> stack(int64_t first) const {
    Stack<P> stack = {0, {}, strip(first).first_row, 0};
    for (int64_t index = first; index < smaller(first + P::stack_strips, strips); ++index) {
      stack.strips[stack.count++] = strip(index);
      stack.rows += stack.strips[stack.count - 1].rows;
    }
    return stack;
  }
  const Unit* queries_of(const Strip& strip) const { return scratch.queries + strip.first_row * units; }

  // Makes a tile of the block the current one, where tiles have scores of their own.
  void look_at(int64_t tile) {
    const int64_t place = tiles_at_once<P> == 1 ? 0 : tile;
    scores = scratch.scores + place * stack_rows<P> * tile_keys;
    weights = scratch.weights + place * stack_rows<P> * weight_step<P>;
    bits = scratch.bits + place * stack_rows<P>;
    visible = seen[place];
  }

  void start_block(int64_t index) {
    block = index;
    for (int64_t tile = 0; tile < block_tiles; ++tile) {
      packed_panels[tile] = 0;
      packed_values[tile] = false;
    }
  }
};

template <class P>
void pack_queries(Run<P>& run) {
  const Matrix queries = query_matrix(run.problem, run.item, run.problem.query, run.problem.width);
  for (int64_t index = 0; index < run.strips; ++index) {
    const Strip strip = run.strip(index);
    auto* target = run.scratch.queries + strip.first_row * run.units;
    if constexpr (P::query_rows) {
      pack_query_rows<P>(queries, strip.first_row, strip.rows, target);
    } else {
      pack_strip<P>(queries, strip.first_row, strip.rows, target, run.scratch.copies);
    }
  }
  if (P::scale_queries(run.scratch.queries, run.rows * run.units, run.scale)) run.scale = 1;
}

// What each strip of the stack sees of the tile; false where none sees anything.
template <class P>
bool see_stack(Run<P>& run, const Stack<P>& stack, const Tile& tile) {
  bool any = false;
  for (int i = 0; i < stack.count; ++i) {
    const int64_t place = stack.place(stack.strips[i]);
    run.visible[i] = see<typename P::Number>(
        stack.strips[i], tile, {run.bits + place, run.scratch.bias + place * tile_keys, run.scratch.predicted});
    any = any || run.visible[i].first < run.visible[i].last;
  }
  return any;
}

// The panels of a tile that hold visible keys: [first, last).
struct PanelRange {
  int64_t first, last;
};
template <class P>
PanelRange panels_of(const Visible& visible) {
  return {visible.first / panel_lanes<P>, (visible.last + panel_lanes<P> - 1) / panel_lanes<P>};
}

template <class P>
typename P::Unit* key_panel(Run<P>& run, const Tile& tile, int64_t panel) {
  return run.scratch.keys + (tile.index * tile_panels<P> + panel) * run.units * panel_lanes<P>;
}

// Whoever needs a panel of the current block's keys first packs it, so it is still in the nearest cache for the
// product.
template <class P>
void pack_keys(Run<P>& run, const Tile& tile, int64_t panel) {
  const uint64_t bit = uint64_t{1} << panel;
  if (run.packed_panels[tile.index] & bit) return;
  pack_key_panel<P>(run.keys, tile.first_key + panel * panel_lanes<P>, key_panel(run, tile, panel), run.scratch.copies);
  run.packed_panels[tile.index] |= bit;
}

template <class P>
void score_tile(Run<P>& run, const Stack<P>& stack, const Tile& tile) {
  for (int64_t start = 0; start < tile_panels<P>; start += panels_at_once) {
    for (int i = 0; i < stack.count; ++i) {
      const Strip& strip = stack.strips[i];
      const PanelRange seen = panels_of<P>(run.visible[i]);
      const int64_t first = larger(start, seen.first);
      const int64_t last = smaller(start + panels_at_once, seen.last);
      run.upcoming.ask(lines_at_once);
      for (int64_t panel = first; panel < last; ++panel) pack_keys(run, tile, panel);
      auto* scores = run.scores + stack.place(strip) * tile_keys;
      if constexpr (P::whole_blocks) {
        for (int64_t panel = first; panel < last; ++panel) {
          run.products.score(run.queries_of(strip), key_panel(run, tile, panel), run.units, strip.rows, run.scale,
                             scores + panel * panel_lanes<P>);
        }
      } else {
        with_panels(strip.rows, first, last, [&](auto rows, auto panels, int64_t panel) {
          score_panels<P, rows.count, tile_keys, panels.count>(run.queries_of(strip), key_panel(run, tile, panel),
                                                               run.units, run.scale, scores + panel * panel_lanes<P>);
        });
      }
    }
  }
}

// The keys around the visible ones that a product takes at once.
template <class P>
Visible widened(const Visible& visible) {
  constexpr int64_t count = P::units_together * P::products;
  return {visible.first / count * count, (visible.last + count - 1) / count * count, visible.whole};
}
template <class P>
VectorRange vectors_of(const Visible& visible) {
  constexpr int64_t count = lanes<typename P::Number>;
  const Visible keys = widened<P>(visible);
  return {keys.first / count, (keys.last + count - 1) / count};
}

// Softcap, bias and mask, in this order, over the vectors of a tile that hold visible keys.
template <class P>
void edit_strip(Run<P>& run, int64_t place, int height, const Visible& visible) {
  using T = typename P::Number;
  const VectorRange range = vectors_of<P>(visible);
  const T softcap = static_cast<T>(run.problem.softcap);
  const bool has_bias = run.problem.bias.data != nullptr;
  for (int64_t row = place; row < place + height; ++row) {
    T* scores = run.scores + row * tile_keys;
    const T* bias = run.scratch.bias + row * tile_keys;
    const Bits bits = run.bits[row];
    for (int64_t v = range.first; v < range.last; ++v) {
      const int64_t key = v * lanes<T>;
      Vector<T> s = load(scores + key);
      if (softcap > 0) s = capped(s, softcap);
      if (has_bias) s += load(bias + key);
      if (!visible.whole) {
        const auto here = static_cast<uint32_t>(bits.word[key >> 6] >> (key & 63));
        s = select<T>(here, s, splat(-Constants<T>::infinity));
      }
      store(scores + key, s);
    }
  }
}

template <class P>
void edit_tile(Run<P>& run, const Stack<P>& stack) {
  const bool every = run.problem.bias.data != nullptr || run.problem.softcap > 0;
  for (int i = 0; i < stack.count; ++i) {
    const Strip& strip = stack.strips[i];
    if (every || !run.visible[i].whole) edit_strip(run, stack.place(strip), strip.rows, run.visible[i]);
  }
}

// Calls function(batch, vectors, index) for all rows of the stack that see something of the tile.
template <class P, class Function>
void for_each_batch(const Run<P>& run, const Stack<P>& stack, const Function& function) {
  constexpr int most = lanes<typename P::Number>;
  for (int i = 0; i < stack.count; ++i) {
    const Visible& visible = run.visible[i];
    if (visible.first >= visible.last) continue;
    const Strip& strip = stack.strips[i];
    for (int row = 0; row < strip.rows; row += most) {
      const Batch batch = {stack.place(strip) + row, static_cast<int>(smaller(most, strip.rows - row))};
      function(batch, vectors_of<P>(visible), i * strip_vectors<P> + row / most);
    }
  }
}

// All maxima first: what one batch waits for is hidden behind the next one's.
template <class P, bool with_moments>
void softmax_tile(Run<P>& run, const Stack<P>& stack, const Tile& tile) {
  using T = typename P::Number;
  T* scores = run.scores;
  Partial<P>& partial = run.scratch.partial;
  Rise<T> rises[P::stack_strips * strip_vectors<P>];
  for_each_batch(run, stack, [&](Batch batch, VectorRange range, int index) {
    raise_maxima<P>(scores, range, partial.state, batch, rises[index]);
    if constexpr (with_moments) note_keys<P>(scores, range, tile.first_key, partial.state, batch, rises[index]);
  });
  for_each_batch(run, stack, [&](Batch batch, VectorRange range, int index) {
    exponentiate_rows<P, with_moments>(scores, run.weights, range, tile, partial, batch, rises[index],
                                       run.scratch.rescale);
  });
}

template <class P>
void count_visible(Run<P>& run, const Stack<P>& stack) {
  int64_t* counts = run.scratch.partial.state.visible;
  for (int i = 0; i < stack.count; ++i) {
    if (run.visible[i].first >= run.visible[i].last) continue;
    const int64_t place = stack.place(stack.strips[i]);
    for (int64_t row = place; row < place + stack.strips[i].rows; ++row) {
      counts[row] += run.visible[i].whole ? tile_keys : count_bits(run.bits[row]);
    }
  }
}

// The tile's values from a panel and a unit on.
template <class P>
Panels<typename P::Unit> value_panels(Run<P>& run, const Tile& tile, int64_t panel, int64_t unit) {
  using Unit = typename P::Unit;
  if (run.values_in_place) {
    const char* row = run.values.at(tile.first_key + unit, panel * panel_lanes<P>);
    return {reinterpret_cast<const Unit*>(row), run.values.row / static_cast<int64_t>(sizeof(Unit)), panel_lanes<P>};
  }
  constexpr int64_t panel_step = block_units<P> * panel_lanes<P>;
  const int64_t first = tile.index * tile_units<P> + unit;
  return {run.scratch.values + panel * panel_step + first * panel_lanes<P>, panel_lanes<P>, panel_step};
}

// Values read where they lie come from memory, a few lines at a time: they are asked for this many keys ahead.
constexpr int keys_ahead = 24;

// The units of a tile that hold visible keys: [first, last).
struct UnitRange {
  int64_t first, last;
};
template <class P>
UnitRange units_of_visible(const Visible& visible) {
  const Visible keys = widened<P>(visible);
  return {keys.first / P::products, keys.last / P::products};
}

template <class P>
void weigh_tile(Run<P>& run, const Stack<P>& stack, const Tile& tile) {
  State<P>& partial = run.scratch.partial.state;
  const int64_t count = partial.width / panel_lanes<P>;
  for (int64_t first = 0; first < count; first += panels_at_once) {
    for (int i = 0; i < stack.count; ++i) {
      const UnitRange range = units_of_visible<P>(run.visible[i]);
      if (range.first >= range.last) continue;
      const int64_t place = stack.place(stack.strips[i]);
      const int64_t last = smaller(first + panels_at_once, count);
      run.upcoming.ask(lines_at_once);
      with_panels(stack.strips[i].rows, first, last, [&](auto rows, auto panels, int64_t panel) {
        constexpr int height = decltype(rows)::count;
        constexpr int at_once = decltype(panels)::count;
        const auto weigh =
            run.values_in_place ? weigh_panels<P, height, at_once, keys_ahead> : weigh_panels<P, height, at_once>;
        weigh(run.weights + place * tile_units<P> + range.first, value_panels(run, tile, panel, range.first),
              range.last - range.first, run.scratch.rescale + place,
              partial.accumulator + place * partial.width + panel * panel_lanes<P>, partial.width);
      });
    }
  }
}

// Copies one row's weights and one panel of values without what is hidden from the row. A visible value that is not
// finite shows even where its weight rounded to zero, because in exact arithmetic no weight is zero: such a key gets
// the smallest weight, and its finite numbers, which would be off the scale of the others, are left out.
template <class P>
void clean_panel(Run<P>& run, int64_t row, const Panels<typename P::Unit>& values, int64_t first, int64_t last) {
  using Unit = typename P::Unit;
  const Bits bits = run.bits[row];
  std::memcpy(run.scratch.clean_weights, run.weights + row * weight_step<P>,
              sizeof(Unit) * static_cast<size_t>(tile_units<P>));
  for (int64_t unit = first; unit < last; ++unit) {
    const Unit* source = values.units + (unit - first) * values.step;
    Unit* target = run.scratch.clean_values + unit * panel_lanes<P>;
    bool seen[P::products];
    bool lifted[P::products] = {};
    for (int i = 0; i < P::products; ++i) {
      const int64_t key = unit * P::products + i;
      seen[i] = bit_at(bits, key);
      if (!seen[i] || P::weight_at(run.scratch.clean_weights, key) != 0) continue;
      for (int v = 0; v < panel_vectors; ++v) lifted[i] = lifted[i] || !P::finite(load(source + v * lanes<Unit>), i);
      if (lifted[i]) P::set_weight(run.scratch.clean_weights, key, Constants<typename P::Number>::smallest);
    }
    for (int v = 0; v < panel_vectors; ++v) {
      Vector<Unit> units = P::keep(load(source + v * lanes<Unit>), seen);
      for (int i = 0; i < P::products; ++i) {
        if (lifted[i]) units = P::without_finite(units, i);
      }
      store(target + v * lanes<Unit>, units);
    }
  }
}

// weigh_tile for values that may hold NaN or infinity: row by row, selecting instead of multiplying by zero.
template <class P>
void weigh_tile_carefully(Run<P>& run, const Stack<P>& stack, const Tile& tile) {
  using T = typename P::Number;
  State<P>& partial = run.scratch.partial.state;
  const T one = 1;
  for (int i = 0; i < stack.count; ++i) {
    const UnitRange range = units_of_visible<P>(run.visible[i]);
    if (range.first >= range.last) continue;
    const int64_t place = stack.place(stack.strips[i]);
    for (int64_t row = place; row < place + stack.strips[i].rows; ++row) {
      for (int64_t panel = 0; panel < partial.width / panel_lanes<P>; ++panel) {
        T* sums = partial.accumulator + row * partial.width + panel * panel_lanes<P>;
        for (int v = 0; v < panel_vectors; ++v) {
          store(sums + v * lanes<T>, shrunk(load(sums + v * lanes<T>), run.scratch.rescale[row]));
        }
        clean_panel(run, row, value_panels(run, tile, panel, range.first), range.first, range.last);
        weigh_panels<P, 1>(run.scratch.clean_weights + range.first,
                           {run.scratch.clean_values + range.first * panel_lanes<P>, panel_lanes<P>, 0},
                           range.last - range.first, &one, sums, partial.width);
      }
    }
  }
}

template <class P>
void pack_values(Run<P>& run, const Tile& tile) {
  if (run.values_in_place || run.packed_values[tile.index]) return;
  const int64_t count = widened<P>({0, tile.high, false}).last;  // no further: a short tile's packing would show
  pack_rows<P>(run.values, tile.first_key, count, run.scratch.values + tile.index * tile_units<P> * panel_lanes<P>,
               block_units<P> * panel_lanes<P>, run.scratch.copies);
  run.packed_values[tile.index] = true;
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
