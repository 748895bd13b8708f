// The tiled forward pass. For every block of 512 keys and every strip of rows: scores tile by tile, softmax, weighted
// sum, into a partial result that starts empty; then the partial is folded into the item's state. What a row computes
// depends on nothing but its own query and the keys visible to it (the bits rule in the numerics policy).
#pragma once

#include "run.h"
#include "softmax.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

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

// Strips take turns at so many panels.
constexpr int panels_at_once = 2;

template <class P>
void score_tile(Run<P>& run, const Stack<P>& stack, const Tile& tile) {
  if (P::coded) run.ask_for_scales(tile);
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
      } else if constexpr (P::coded) {
        const QueryCodes<P> queries = run.codes_of(strip);
        with_panels<typename P::Keys>(strip.rows, first, last, [&](auto rows, auto panels, int64_t panel) {
          constexpr int height = decltype(rows)::count;
          constexpr int at_once = decltype(panels)::count;
          const auto score = run.ahead ? score_codes<P, height, tile_keys, at_once, true>
                                       : score_codes<P, height, tile_keys, at_once, false>;
          const auto* keys = key_panel(run, tile, panel);
          score(queries, keys, run.key_scale(tile) + panel * panel_lanes<P>, scores + panel * panel_lanes<P>,
                run.ahead_of(keys));
        });
      } else {
        with_panels<P>(strip.rows, first, last, [&](auto rows, auto panels, int64_t panel) {
          constexpr int height = decltype(rows)::count;
          constexpr int at_once = decltype(panels)::count;
          const auto score = run.ahead && run.page ? score_panels<P, height, tile_keys, at_once, true>
                                                   : score_panels<P, height, tile_keys, at_once, false>;
          const auto* keys = key_panel(run, tile, panel);
          score(run.queries_of(strip), keys, run.units, run.scale, scores + panel * panel_lanes<P>, run.ahead_of(keys));
        });
      }
    }
  }
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

// The units of a tile that hold visible keys: [first, last).
struct UnitRange {
  int64_t first, last;
};
template <class P>
UnitRange units_of_visible(const Visible& visible) {
  const Visible keys = widened<P>(visible);
  return {keys.first / P::products, keys.last / P::products};
}

// Weights become codes first, whose scale holds those of the values; a tile's sums are exact integers.
template <class P>
void weigh_coded_tile(Run<P>& run, const Stack<P>& stack, const Tile& tile) {
  State<P>& partial = run.scratch.partial.state;
  for (int i = 0; i < stack.count; ++i) {
    const UnitRange range = units_of_visible<P>(run.visible[i]);
    if (range.first >= range.last) continue;
    const VectorRange vectors = vectors_of<P>(run.visible[i]);
    const int64_t place = stack.place(stack.strips[i]);
    auto* codes = run.scratch.weight_codes + place * tile_units<P>;
    for (int row = 0; row < stack.strips[i].rows; row += lanes<float>) {
      code_weights<P>(run.scores + (place + row) * tile_keys, run.value_scale(tile), vectors.first, vectors.last,
                      static_cast<int>(smaller(lanes<float>, stack.strips[i].rows - row)), codes + row * tile_units<P>,
                      run.scratch.weight_scale + place + row);
    }
    with_panels<P>(stack.strips[i].rows, 0, partial.width / panel_lanes<P>, [&](auto rows, auto panels, int64_t panel) {
      constexpr int height = decltype(rows)::count;
      constexpr int at_once = decltype(panels)::count;
      const auto weigh = run.ahead ? weigh_codes<P, height, at_once, true> : weigh_codes<P, height, at_once, false>;
      const auto values = value_panels(run, tile, panel, range.first);
      weigh(codes + range.first, values, range.last - range.first, run.scratch.rescale + place,
            run.scratch.weight_scale + place, partial.accumulator + place * partial.width + panel * panel_lanes<P>,
            partial.width, run.ahead_of(values.units));
    });
  }
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
      with_panels<P>(stack.strips[i].rows, first, last, [&](auto rows, auto panels, int64_t panel) {
        constexpr int height = decltype(rows)::count;
        constexpr int at_once = decltype(panels)::count;
        using Stored = typename P::Stored;
        const auto weigh = run.ahead ? weigh_panels<P, height, at_once, true, Stored>
                                     : weigh_panels<P, height, at_once, false, Stored>;
        const auto values = value_panels(run, tile, panel, range.first);
        weigh(run.weights + place * tile_units<P> + range.first, values, range.last - range.first,
              run.scratch.rescale + place, partial.accumulator + place * partial.width + panel * panel_lanes<P>,
              partial.width, run.ahead_of(values.units));
      });
    }
  }
}

// Copies one row's weights and one panel of values without what is hidden from the row. A visible value that is not
// finite shows even where its weight rounded to zero, because in exact arithmetic no weight is zero: such a key gets
// the smallest weight, and its finite numbers, which would be off the scale of the others, are left out.
template <class P>
void clean_panel(Run<P>& run, int64_t row, const Panels<typename P::Stored>& values, int64_t first, int64_t last) {
  using Unit = typename P::Unit;
  const Bits bits = run.bits[row];
  std::memcpy(run.scratch.clean_weights, run.weights + row * weight_step<P>,
              sizeof(Unit) * static_cast<size_t>(tile_units<P>));
  for (int64_t unit = first; unit < last; ++unit) {
    const auto* source = values.units + (unit - first) * values.step;
    Unit* target = run.scratch.clean_values + unit * panel_lanes<P>;
    bool seen[P::products];
    bool lifted[P::products] = {};
    for (int i = 0; i < P::products; ++i) {
      const int64_t key = unit * P::products + i;
      seen[i] = bit_at(bits, key);
      if (!seen[i] || P::weight_at(run.scratch.clean_weights, key) != 0) continue;
      for (int v = 0; v < panel_vectors; ++v)
        lifted[i] = lifted[i] || !P::finite(P::load_stored(source + v * lanes<Unit>), i);
      if (lifted[i]) P::set_weight(run.scratch.clean_weights, key, Constants<typename P::Number>::smallest);
    }
    for (int v = 0; v < panel_vectors; ++v) {
      Vector<Unit> units = P::keep(P::load_stored(source + v * lanes<Unit>), seen);
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
        const Panels<typename P::Unit> clean = {run.scratch.clean_values + range.first * panel_lanes<P>, panel_lanes<P>,
                                                0};
        weigh_panels<P, 1>(run.scratch.clean_weights + range.first, clean, range.last - range.first, &one, sums,
                           partial.width);
      }
    }
  }
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
