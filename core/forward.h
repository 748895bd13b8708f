// The entry points of the forward pass: attend a range of blocks, fold partial results, finish rows, or write the
// scores.
#pragma once

#include "block.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

inline int64_t rows_of(const Problem& problem, const Item& item) {
  return item.queries * (problem.query_heads / problem.key_heads);
}

inline Rectangle rectangle_of(const Problem& problem, const Item& item, int64_t first_key, int64_t last_key) {
  const Band queries = query_hull(problem, item.first_query, item.queries);
  return {item.batch, queries.low, queries.high, first_key, last_key};
}

inline BlockRange visible_blocks(const Problem& problem, const Item& item) {
  if (problem.keys == 0 || item.queries == 0) return {0, 0};
  const Band keys = visible_keys(problem, rectangle_of(problem, item, 0, problem.keys - 1));
  const int64_t low = larger(keys.low, 0);
  const int64_t high = smaller(keys.high, problem.keys - 1);
  if (low > high) return {0, 0};
  return {block_of(problem.key_start + low), block_of(problem.key_start + high) + 1};
}

// What the item sees of a block, from positions alone.
inline Label label_of_block(const Problem& problem, const Item& item, int64_t block) {
  const int64_t first = block * block_keys - problem.key_start;
  return label_of(problem,
                  rectangle_of(problem, item, larger(0, first), smaller(problem.keys, first + block_keys) - 1));
}

// Asks every predicate about the item's rows and the block's keys, once for all strips.
template <class AnyScratch>
bool predict(const Problem& problem, const Item& item, int64_t block, const AnyScratch& scratch) {
  const int64_t group = problem.query_heads / problem.key_heads;
  const int64_t rows = rows_of(problem, item);
  const int64_t start = query_start_of(problem, item.batch);
  for (int64_t row = 0; row < rows; ++row) {
    scratch.heads[row] = problem.head_offset + item.key_head * group + row % group;
    scratch.positions[row] = start + query_index(problem, item.first_query + row / group);
  }
  const int64_t first = block * block_keys;
  const int64_t low = larger(first, problem.key_start);
  const int64_t high = smaller(first + block_keys, problem.key_start + problem.keys);
  for (int i = 0; i < problem.predicates; ++i) {
    uint64_t* bits = scratch.predicted + i * rows * (block_keys / 64);
    std::memset(bits, 0, static_cast<size_t>(rows * (block_keys / 64)) * sizeof(uint64_t));
    const PredicateCall call = {i,          item.batch,  scratch.heads, scratch.positions, rows, low,
                                high - low, low - first, bits};
    const SubnormalsAreNumbers mode;  // a user's function computes as it does elsewhere
    if (!problem.predicate(problem.context, call)) return false;
  }
  return true;
}

// Enters the next block: false where the item sees nothing of it, or the run was stopped.
template <class P>
bool enter_block(Run<P>& run, int64_t block) {
  if (!run.start_block(block)) return false;
  if (label_of_block(run.problem, run.item, block) == Label::empty) return false;
  if (run.problem.pages.rows) open_rows(run);
  if (run.problem.predicates == 0) return true;
  run.products.pause();
  return predict(run.problem, run.item, run.block, run.scratch);
}

template <class P>
void reset(const Problem& problem, const Item& item, char* memory) {
  Carver carver(memory);
  State<P>(problem, rows_of(problem, item), carver).reset(rows_of(problem, item));
}

// The keys and values of a block that comes next.
template <class P>
void ask_for_block(Run<P>& run, int64_t block) {
  const int64_t first = block * block_keys - run.problem.key_start;
  run.upcoming.start(rows_between(run.keys, first, first + block_keys),
                     rows_between(run.values, first, first + block_keys));
}

template <class P>
void attend(const Problem& problem, const Item& item, BlockRange blocks, char* state_memory, int64_t state_step,
            char* scratch) {
  const SubnormalsAreZero mode;
  Run<P> run(problem, item, scratch);
  pack_queries(run);
  for (int64_t block = blocks.first; block < blocks.last; ++block) {
    Carver carver(state_memory + (block - blocks.first) * state_step);
    State<P> state(problem, run.rows, carver);
    if (state_step) state.reset(run.rows);
    if (problem.stopped(problem.context)) return;
    if (!enter_block(run, block)) continue;
    if (block + 1 < blocks.last && !run.values_in_place && !run.page) ask_for_block(run, block + 1);
    for (int64_t index = 0; index < run.strips; index += P::stack_strips) {
      const Stack<P> stack = run.stack(index);
      attend_stack(run, stack, false);
      // Hidden NaN or infinity times a weight of zero is NaN: what is not finite is computed again, with selection.
      // Codes are finite.
      const State<P>& partial = run.scratch.partial.state;
      if (!P::coded && !all_finite(partial.accumulator, stack.rows * partial.width)) attend_stack(run, stack, true);
      fold_rows(state, stack.first_row, partial, 0, stack.rows);
    }
  }
}

template <class P>
void fold(const Problem& problem, const Item& item, char* state_memory, const char* next_memory) {
  const SubnormalsAreZero mode;
  const int64_t rows = rows_of(problem, item);
  Carver carver(state_memory);
  Carver next_carver(const_cast<char*>(next_memory));
  State<P> state(problem, rows, carver);
  const State<P> next(problem, rows, next_carver);
  fold_rows(state, 0, next, 0, rows);
}

template <class P>
void write_moments(const State<P>& state, int64_t row, double* target) {
  const RowMoments& moments = state.moments[row];
  target[moment_maximum] = static_cast<double>(state.maximum[row]);
  target[moment_sum] = static_cast<double>(state.sum[row]);
  target[moment_first] = moments.first;
  target[moment_second] = moments.second;
  target[moment_squares] = moments.squares;
  target[moment_column] = moments.column;
  target[moment_argmax] = moments.argmax;
  target[moment_visible] = static_cast<double>(state.visible[row]);
  target[moment_first_score] = moments.first_score;
}

// Rounds numbers to a type and stores them `step` bytes apart.
template <class T>
void store_numbers(Type type, int64_t step, char* target, const T* numbers, int64_t count) {
  if (step == static_cast<int64_t>(sizeof(T)) && size_of(type) == sizeof(T)) {
    std::memcpy(target, numbers, static_cast<size_t>(count) * sizeof(T));
    return;
  }
  int64_t stored = 0;
  if constexpr (sizeof(T) == sizeof(float)) {
    const bool whole = type == Type::bfloat16 && step == size_of(type);
    for (; whole && stored + lanes<T> <= count; stored += lanes<T>) {
      store_bfloat16(reinterpret_cast<uint16_t*>(target + stored * step), load(numbers + stored));
    }
  }
  for (int64_t i = stored; i < count; ++i) put_number(type, target + i * step, static_cast<double>(numbers[i]));
}

// Divides by the sum, with the head's sink in it, rounds once to the output's type and stores.
template <class P>
void finish(const Problem& problem, const Item& item, char* state_memory, char* scratch) {
  using T = typename P::Number;
  const SubnormalsAreZero mode;
  const int64_t rows = rows_of(problem, item);
  Carver carver(state_memory);
  State<P> state(problem, rows, carver);
  T* values = reinterpret_cast<T*>(scratch);
  const Pages& pages = problem.pages;
  const int64_t columns = (item.batch * problem.key_heads + item.key_head) * pages.value_columns;
  const Strip all = {&problem, &item, 0, static_cast<int>(rows)};
  char* data = problem.out.data + batch_offset(problem, problem.out, item.batch);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = all.head(static_cast<int>(row));
    const int64_t query = item.first_query + row / all.group();
    const T before = state.maximum[row];
    const T sink = problem.sinks ? static_cast<T>(problem.sinks[head]) : -Constants<T>::infinity;
    const T after = sink > before ? sink : before;
    const T shift = after == -Constants<T>::infinity ? T{0} : after;
    // Scores that are all -inf have no softmax (-inf - -inf), and a sink does not give them one.
    const bool undefined = before == -Constants<T>::infinity && state.visible[row] > 0;
    const T factor = undefined ? before - before : before == after ? T{1} : exp_nonpositive(before - shift);
    const T sum = state.sum[row] * factor + (problem.sinks ? exp_nonpositive(sink - shift) : T{0});
    const T* source = state.accumulator + row * state.width;
    for (int64_t column = 0; column < state.width; column += lanes<T>) {
      Vector<T> quotient = shrunk(load(source + column), factor) / splat(sum);
      if constexpr (P::coded) {
        if (pages.value_factors) quotient *= load(pages.value_factors + columns + column);
        if (pages.value_means) {
          const T share = state.sum[row] * factor / sum;  // less than one where there is a sink
          quotient = fma(splat(share), load(pages.value_means + columns + column), quotient);
        }
      }
      store(values + column, state.visible[row] ? quotient : Vector<T>{});
    }
    store_numbers(problem.out.type, problem.out.column, data + head * problem.out.head + query * problem.out.row,
                  values, problem.value_width);
    if (problem.moments) {
      const int64_t place = (item.batch * problem.query_heads + head) * problem.queries + query;
      write_moments(state, row, problem.moments + place * moment_count);
    }
  }
}

template <class T>
void store_scores(const Problem& problem, const Item& item, const Strip& strip, const Tile& tile, const T* scores,
                  bool nothing_seen) {
  const Tensor& out = problem.out;
  char* data = out.data + batch_offset(problem, out, item.batch);
  for (int row = 0; row < strip.rows; ++row) {
    const int64_t place = item.first_query + (strip.first_row + row) / strip.group();
    char* target = data + strip.head(row) * out.head + place * out.row + tile.first_key * out.column;
    for (int64_t key = tile.low; key < tile.high; ++key) {
      const T score = nothing_seen ? -Constants<T>::infinity : scores[row * tile_keys + key];
      put_number(out.type, target + key * out.column, static_cast<double>(score));
    }
  }
}

// Writes the edited scores of an item's rows, -inf where hidden: the weights that a user asks to see start from them.
template <class P>
void scores(const Problem& problem, const Item& item, BlockRange blocks, char* scratch) {
  const SubnormalsAreZero mode;
  Run<P> run(problem, item, scratch);
  pack_queries(run);
  for (int64_t block = blocks.first; block < blocks.last; ++block) {
    if (problem.stopped(problem.context)) return;
    const bool seen = enter_block(run, block);
    for (int64_t index = 0; index < run.strips; index += P::stack_strips) {
      const Stack<P> stack = run.stack(index);
      for (int64_t place = 0; place < block_tiles; ++place) {
        const Tile tile = tile_at(problem, block, place);
        if (tile.low >= tile.high) continue;
        if (seen) see_stack(run, stack, tile);
        for (int i = 0; i < stack.count; ++i) {
          const bool nothing = !seen || run.visible[i].first >= run.visible[i].last;
          run.visible[i] = {0, nothing ? 0 : tile_keys, run.visible[i].whole};
        }
        if (seen) {
          score_tile(run, stack, tile);
          edit_tile(run, stack);
        }
        for (int i = 0; i < stack.count; ++i) {
          const Strip& strip = stack.strips[i];
          store_scores(problem, item, strip, tile, run.scratch.scores + stack.place(strip) * tile_keys,
                       run.visible[i].last == 0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
