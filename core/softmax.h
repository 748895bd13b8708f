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

template <class T>
inline T row_maximum(const T* scores, VectorRange range) {
  Vector<T> largest = splat(-Constants<T>::infinity);
  for (int64_t v = range.first; v < range.last; ++v) largest = maximum(load(scores + v * lanes<T>), largest);
  return largest_of<T>(largest);
}

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

// Turns one row of scores into weights e^(s - m), where m is the largest score of the block so far and `here` that of
// this tile, and says by what factor everything gathered before must shrink. Hidden keys hold -inf and get exactly
// zero.
template <class P, bool with_moments>
typename P::Number softmax_row(const typename P::Number* scores, typename P::Number here, typename P::Unit* weights,
                               VectorRange range, int64_t first_key, State<P>& state, int64_t row) {
  using T = typename P::Number;
  const T before = state.maximum[row];
  const T after = here > before ? here : before;
  const T shift = after == -Constants<T>::infinity ? T{0} : after;
  const T factor = after == before ? T{1} : exp_nonpositive(before - shift);
  if constexpr (with_moments) {
    RowMoments& moments = state.moments[row];
    if (here > before) {
      move_moments(moments, static_cast<double>(before) - shift, factor, state.sum[row]);
      moments.argmax = static_cast<double>(first_key + key_of(here, scores, range));
    }
    const int64_t own = -first_key;
    if (own >= range.first * lanes<T> && own < range.last * lanes<T>) moments.first_score = scores[own];
  }
  // A hidden key has t = -inf and p = 0: a finite t keeps 0 * inf from becoming NaN.
  const Vector<T> lowest = splat(-Constants<T>::largest);
  Vector<T> total = {}, first = {}, second = {}, squares = {}, column = {};
  Vector<T> key = ramp<T>() + splat(static_cast<T>(range.first * lanes<T>));
  for (int64_t v = range.first; v < range.last; ++v) {
    const Vector<T> t = load(scores + v * lanes<T>) - splat(shift);
    const Vector<T> p = exp_nonpositive<T>(t);
    total += p;
    if constexpr (with_moments) {
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
  const T sum = sum_of<T>(total);
  if constexpr (with_moments) {
    RowMoments& moments = state.moments[row];
    moments.first += sum_of<T>(first);
    moments.second += sum_of<T>(second);
    moments.squares += sum_of<T>(squares);
    moments.column += static_cast<double>(sum_of<T>(column)) + static_cast<double>(first_key) * sum;
  }
  state.maximum[row] = after;
  state.sum[row] = state.sum[row] * factor + sum;
  return factor;
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
