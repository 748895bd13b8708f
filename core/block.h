// The order of work over one block of keys: tile by tile, or, for an arithmetic that has the scores of a whole block
// before it weighs its values, in three long turns. With one maximum for the whole block no sum shrinks on the way, so
// sums stay in the tiles of the matrix unit from the block's first key to its last. Matrix unit and vector units also
// take turns less often, and every turn costs: the unit falls asleep after a thousand cycles without work, takes as
// long to wake up, and while it is awake, multiply-adds of vectors run at half their speed.
#pragma once

#include "attention.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

// The softmax of all tiles of the block, with one maximum for all of them.
template <class P, bool with_moments>
void softmax_block(Run<P>& run, const Stack<P>& stack) {
  using T = typename P::Number;
  Partial<P>& partial = run.scratch.partial;
  Rise<T> rises[P::stack_strips * strip_vectors<P>];
  for (int64_t index = 0; index < block_tiles; ++index) {
    run.look_at(index);
    const int64_t first_key = tile_at(run.problem, run.block, index).first_key;
    for_each_batch(run, stack, [&](Batch batch, VectorRange range, int place) {
      Rise<T>& rise = rises[place];
      raise_maxima<P>(run.scores, range, partial.state, batch, rise);
      if constexpr (with_moments) note_keys<P>(run.scores, range, first_key, partial.state, batch, rise);
      std::memcpy(partial.state.maximum + batch.first, rise.after, static_cast<size_t>(batch.count) * sizeof(T));
      for (T& factor : rise.factor) factor = 1;
    });
  }
  for (int64_t index = 0; index < block_tiles; ++index) {
    run.look_at(index);
    const Tile tile = tile_at(run.problem, run.block, index);
    for_each_batch(run, stack, [&](Batch batch, VectorRange range, int place) {
      exponentiate_rows<P, with_moments>(run.scores, run.weights, range, tile, partial, batch, rises[place],
                                         run.scratch.rescale);
    });
  }
}

// The weighted sum over all tiles of the block, of rows from `row` on of one strip; carefully of one row, without what
// is hidden from it.
template <class P>
void weigh_block(Run<P>& run, int strip, int64_t row, int height, bool carefully) {
  State<P>& partial = run.scratch.partial.state;
  for (int64_t panel = 0; panel < partial.width / panel_lanes<P>; ++panel) {
    run.products.clear(height);
    for (int64_t index = 0; index < block_tiles; ++index) {
      run.look_at(index);
      const UnitRange range = units_of_visible<P>(run.visible[strip]);
      if (range.first >= range.last) continue;
      auto values = value_panels(run, tile_at(run.problem, run.block, index), panel, range.first);
      const auto* weights = run.weights + row * weight_step<P>;
      if (carefully) {
        clean_panel(run, row, values, range.first, range.last);
        values.units = run.scratch.clean_values + range.first * panel_lanes<P>;
        weights = run.scratch.clean_weights;
      }
      run.products.add(weights + range.first, weight_step<P>, values.units, range.last - range.first);
    }
    run.products.store_sums(partial.accumulator + row * partial.width + panel * panel_lanes<P>, partial.width);
  }
}

template <class P>
void attend_whole_block(Run<P>& run, const Stack<P>& stack, bool carefully) {
  for (int64_t index = 0; index < block_tiles; ++index) {
    const Tile tile = tile_at(run.problem, run.block, index);
    run.look_at(index);
    for (int i = 0; i < stack.count; ++i) run.visible[i] = {0, 0, false};
    if (tile.low >= tile.high || !see_stack(run, stack, tile)) continue;
    score_tile(run, stack, tile);
    edit_tile(run, stack);
    count_visible(run, stack);
    pack_values(run, tile);
  }
  if (run.problem.moments) {
    softmax_block<P, true>(run, stack);
  } else {
    softmax_block<P, false>(run, stack);
  }
  for (int i = 0; i < stack.count; ++i) {
    const int64_t place = stack.place(stack.strips[i]);
    const int height = carefully ? 1 : stack.strips[i].rows;
    for (int row = 0; row < stack.strips[i].rows; row += height) weigh_block(run, i, place + row, height, carefully);
  }
}

// One block for one stack, tile by tile.
template <class P>
void attend_tiles(Run<P>& run, const Stack<P>& stack, bool carefully) {
  const auto softmax = run.problem.moments ? softmax_tile<P, true> : softmax_tile<P, false>;
  for (int64_t index = 0; index < block_tiles; ++index) {
    const Tile tile = tile_at(run.problem, run.block, index);
    if (tile.low >= tile.high || !see_stack(run, stack, tile)) continue;
    score_tile(run, stack, tile);
    edit_tile(run, stack);
    count_visible(run, stack);
    softmax(run, stack, tile);
    pack_values(run, tile);
    if constexpr (P::coded) {
      weigh_coded_tile(run, stack, tile);
    } else if (carefully) {
      weigh_tile_carefully(run, stack, tile);
    } else {
      weigh_tile(run, stack, tile);
    }
  }
}

// One block for one stack, into the scratch's partial result.
template <class P>
void attend_stack(Run<P>& run, const Stack<P>& stack, bool carefully) {
  run.scratch.partial.reset(stack.rows);
  if constexpr (P::whole_blocks) {
    attend_whole_block(run, stack, carefully);
  } else {
    attend_tiles(run, stack, carefully);
  }
  gather_lanes(run.scratch.partial, stack.rows, tile_at(run.problem, run.block, 0).first_key);
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
