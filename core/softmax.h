// The streaming softmax of one tile: running maximum and sum for each row, weights for the product with the values,
// and, where they are asked for, the moments from which statistics are made.
#pragma once

#include "workspace.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

// The vectors of a tile that hold visible keys: [first, last).
struct VectorRange {
  int64_t first, last;
};

// When the maximum rises by -delta, sums of e^(s - m) and of its moments move to the new maximum
// (u <- e^delta (u + delta l), and the square alike). A factor of zero leaves nothing, and its delta may be -inf.
inline void move_moments(RowMoments& moments, double delta, double factor, double sum) {
  if (factor == 0) {
    moments.first = moments.second = moments.squares = moments.column = 0;
    return;
  }
  moments.second = factor * (moments.second + 2 * delta * moments.first + delta * delta * sum);
  moments.first = factor * (moments.first + delta * sum);
  moments.squares *= factor * factor;
  moments.column *= factor;
}

// Lowest key of the tile whose score is the tile's largest.
template <class T>
inline int64_t key_of(T score, const T* scores, VectorRange range) {
  for (int64_t key = range.first * lanes<T>; key < range.last * lanes<T>; ++key) {
    if (scores[key] == score) return key;
  }
  return range.first * lanes<T>;
}

// Rows of one strip that are reduced together, one to a lane: `count` rows from `first` of the stack on.
struct Batch {
  int64_t first;
  int count;
};

// Lanes hold the rows' running maxima: where they were, where they are, what to subtract, and how what was gathered
// shrinks.
template <class T>
struct Rise {
  T before[lanes<T>] = {};
  T here[lanes<T>];
  T after[lanes<T>];
  T shift[lanes<T>];
  T factor[lanes<T>];
};

template <class P>
void raise_maxima(const typename P::Number* scores, VectorRange range, const State<P>& state, Batch batch,
                  Rise<typename P::Number>& rise) {
  using T = typename P::Number;
  const Vector<T> none = splat(-Constants<T>::infinity);
  Vector<T> tops[lanes<T>];
  for (int row = 0; row < lanes<T>; ++row) {
    tops[row] = none;
    if (row >= batch.count) continue;
    const T* own = scores + (batch.first + row) * tile_keys;
    for (int64_t v = range.first; v < range.last; ++v) tops[row] = maximum(load(own + v * lanes<T>), tops[row]);
  }
  reduce_rows<Larger, T>(tops, rise.here);
  std::memcpy(rise.before, state.maximum + batch.first, static_cast<size_t>(batch.count) * sizeof(T));
  const Vector<T> before = load(rise.before);
  const Vector<T> here = load(rise.here);
  const Vector<T> after = here > before ? here : before;
  const Vector<T> shift = after == none ? Vector<T>{} : after;
  store(rise.after, after);
  store(rise.shift, shift);
  store(rise.factor, before == after ? splat(T{1}) : exp_nonpositive<T>(before - shift));
}

// What one row's exponentials add up to, lane by lane.
template <class T, bool with_moments>
struct Sums {
  Vector<T> total[lanes<T>] = {};
};
template <class T>
struct Sums<T, true> {
  Vector<T> total[lanes<T>] = {};
  Vector<T> first[lanes<T>] = {};
  Vector<T> second[lanes<T>] = {};
  Vector<T> squares[lanes<T>] = {};
  Vector<T> column[lanes<T>] = {};
};

// Scores of one row to weights e^(s - shift), and their sums. Hidden keys hold -inf and get exactly zero.
template <class P, bool with_moments>
inline void exponentiate_row(const typename P::Number* scores, typename P::Unit* weights, VectorRange range,
                             typename P::Number shift, Sums<typename P::Number, with_moments>& sums, int row) {
  using T = typename P::Number;
  const Vector<T> lowest = splat(-Constants<T>::largest);
  Vector<T> total = {}, first = {}, second = {}, squares = {}, column = {};
  Vector<T> key = ramp<T>() + splat(static_cast<T>(range.first * lanes<T>));
  for (int64_t v = range.first; v < range.last; ++v) {
    const Vector<T> t = load(scores + v * lanes<T>) - splat(shift);
    const Vector<T> p = exp_nonpositive<T>(t);
    total += p;
    if constexpr (with_moments) {
      // A hidden key has t = -inf and p = 0: a finite t keeps 0 * inf from becoming NaN.
      const Vector<T> finite = maximum(lowest, t);
      const Vector<T> weighted = p * finite;
      first += weighted;
      second = fma(weighted, finite, second);
      squares = fma(p, p, squares);
      column = fma(p, key, column);
      key += splat(static_cast<T>(lanes<T>));
    }
    P::store_weights(weights, v * lanes<T>, p);
  }
  sums.total[row] = total;
  if constexpr (with_moments) {
    sums.first[row] = first;
    sums.second[row] = second;
    sums.squares[row] = squares;
    sums.column[row] = column;
  }
}

// Before the weights take the scores' place: moments move to the risen maximum, and the new one's key is noted.
template <class P>
void raise_moments(const typename P::Number* scores, VectorRange range, int64_t first_key, State<P>& state, Batch batch,
                   const Rise<typename P::Number>& rise) {
  using T = typename P::Number;
  for (int row = 0; row < batch.count; ++row) {
    const int64_t place = batch.first + row;
    const T* own = scores + place * tile_keys;
    RowMoments& moments = state.moments[place];
    if (rise.here[row] > rise.before[row]) {
      move_moments(moments, static_cast<double>(rise.before[row]) - rise.shift[row], rise.factor[row],
                   state.sum[place]);
      moments.argmax = static_cast<double>(first_key + key_of(rise.here[row], own, range));
    }
    const int64_t key = -first_key;
    if (key >= range.first * lanes<T> && key < range.last * lanes<T>) moments.first_score = own[key];
  }
}

template <class P>
void add_moments(Sums<typename P::Number, true>& sums, const typename P::Number* total, int64_t first_key,
                 State<P>& state, Batch batch) {
  using T = typename P::Number;
  T first[lanes<T>], second[lanes<T>], squares[lanes<T>], column[lanes<T>];
  reduce_rows<Add, T>(sums.first, first);
  reduce_rows<Add, T>(sums.second, second);
  reduce_rows<Add, T>(sums.squares, squares);
  reduce_rows<Add, T>(sums.column, column);
  for (int row = 0; row < batch.count; ++row) {
    RowMoments& moments = state.moments[batch.first + row];
    moments.first += first[row];
    moments.second += second[row];
    moments.squares += squares[row];
    moments.column += static_cast<double>(column[row]) + static_cast<double>(first_key) * total[row];
  }
}

// Turns rows of scores into weights e^(s - m), where m is a row's largest score of the block so far, and says in
// `rescale` by what factor everything gathered before must shrink.
template <class P, bool with_moments>
void softmax_rows(const typename P::Number* scores, typename P::Unit* weights, VectorRange range, int64_t first_key,
                  State<P>& state, Batch batch, typename P::Number* rescale) {
  using T = typename P::Number;
  Rise<T> rise;
  raise_maxima<P>(scores, range, state, batch, rise);
  if constexpr (with_moments) raise_moments<P>(scores, range, first_key, state, batch, rise);
  Sums<T, with_moments> sums;
  for (int row = 0; row < batch.count; ++row) {
    const int64_t place = batch.first + row;
    exponentiate_row<P, with_moments>(scores + place * tile_keys, weights + place * tile_units<P>, range,
                                      rise.shift[row], sums, row);
  }
  T total[lanes<T>] = {};
  reduce_rows<Add, T>(sums.total, total);
  if constexpr (with_moments) add_moments<P>(sums, total, first_key, state, batch);
  for (int row = 0; row < batch.count; ++row) {
    const int64_t place = batch.first + row;
    state.maximum[place] = rise.after[row];
    state.sum[place] = state.sum[place] * rise.factor[row] + total[row];
    rescale[place] = rise.factor[row];
  }
}

// Numbers times a factor of at most 1. A factor that rounded to zero leaves what is not finite as it is: in exact
// arithmetic no factor is zero.
template <class T>
inline Vector<T> shrunk(Vector<T> numbers, T factor) {
  const Vector<T> product = numbers * splat(factor);
  return factor == 0 ? (numbers - numbers == Vector<T>{} ? product : numbers) : product;
}

// Folds one block's partial result of a row into what the blocks before it gave: both move to the larger maximum.
template <class P>
void fold_row(State<P>& state, int64_t row, const State<P>& next, int64_t next_row) {
  using T = typename P::Number;
  if (next.visible[next_row] == 0) return;
  const T before = state.maximum[row];
  const T here = next.maximum[next_row];
  const T after = here > before ? here : before;
  const T shift = after == -Constants<T>::infinity ? T{0} : after;
  const T old_factor = before == after ? T{1} : exp_nonpositive(before - shift);
  const T new_factor = here == after ? T{1} : exp_nonpositive(here - shift);
  if (state.moments) {
    RowMoments& kept = state.moments[row];
    RowMoments added = next.moments[next_row];
    if (before != after) move_moments(kept, static_cast<double>(before) - shift, old_factor, state.sum[row]);
    if (here != after) move_moments(added, static_cast<double>(here) - shift, new_factor, next.sum[next_row]);
    kept = {kept.first + added.first,
            kept.second + added.second,
            kept.squares + added.squares,
            kept.column + added.column,
            here > before ? added.argmax : kept.argmax,
            added.first_score > kept.first_score ? added.first_score : kept.first_score};
  }
  state.maximum[row] = after;
  state.sum[row] = state.sum[row] * old_factor + next.sum[next_row] * new_factor;
  state.visible[row] += next.visible[next_row];
  T* target = state.accumulator + row * state.width;
  const T* source = next.accumulator + next_row * next.width;
  for (int64_t column = 0; column < state.width; column += lanes<T>) {
    // + 0 makes a negative zero positive: hidden keys, which add +0, must not show even there.
    const Vector<T> added = load(source + column) + Vector<T>{};
    const Vector<T> kept = shrunk(load(target + column), old_factor);
    store(target + column, new_factor == 0 ? kept + shrunk(added, new_factor) : fma(added, splat(new_factor), kept));
  }
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
