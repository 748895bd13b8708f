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
template <class Sum, class Factor>
inline void move_moments(Sum& first, Sum& second, Sum& squares, Sum& column, Sum total, Factor delta, Factor factor) {
  if (factor == 0) {
    first = second = squares = column = Sum{};
    return;
  }
  second = factor * (second + 2 * delta * first + delta * delta * total);
  first = factor * (first + delta * total);
  squares *= factor * factor;
  column *= factor;
}

// Lowest key of the vectors whose score is `score`.
template <class T>
inline int64_t key_of(T score, const T* scores, VectorRange range) {
  for (int64_t v = range.first; v < range.last; ++v) {
    const uint32_t equal = lanes_where<T>(load(scores + v * lanes<T>) == splat(score));
    if (equal) return v * lanes<T> + __builtin_ctz(equal);
  }
  return range.first * lanes<T>;
}

// What is subtracted from scores below a top: the top, or nothing where no key was seen.
template <class T>
inline Vector<T> subtracted(Vector<T> top) {
  return top == splat(-Constants<T>::infinity) ? Vector<T>{} : top;
}

// By what sums shrink that were gathered under a maximum that is no longer the top.
template <class T>
inline Vector<T> shrinkage(Vector<T> before, Vector<T> top) {
  return before == top ? splat(T{1}) : exp_nonpositive<T>(before - subtracted<T>(top));
}

// Rows of one strip that are treated together, one to a lane: `count` rows from `first` of the stack on.
struct Batch {
  int64_t first;
  int count;
};

// Lanes hold the rows' running maxima: where they were, what the tile has, where they are, what to subtract, and how
// what was gathered shrinks.
template <class T>
struct Rise {
  T before[lanes<T>];
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
  for (int row = 0; row < lanes<T>; ++row) tops[row] = none;
  for (int row = 0; row < batch.count; ++row) {
    const T* own = scores + (batch.first + row) * tile_keys;
    Vector<T> top = none;
    for (int64_t v = range.first; v < range.last; ++v) top = maximum(load(own + v * lanes<T>), top);
    tops[row] = top;
  }
  reduce_rows<Larger, T>(tops, rise.here);
  const Vector<T> before = load(state.maximum + batch.first);
  const Vector<T> here = load(rise.here);
  const Vector<T> after = here > before ? here : before;
  store(rise.before, before);
  store(rise.after, after);
  store(rise.shift, subtracted<T>(after));
  store(rise.factor, shrinkage<T>(before, after));
}

// Scores of one row to weights e^(s - shift), added lane by lane to the row's sums. Hidden keys hold -inf and get
// exactly zero.
template <class P, bool with_moments>
inline void exponentiate_row(const typename P::Number* scores, typename P::Unit* weights, VectorRange range,
                             typename P::Number key_offset, LaneSums<P>& sums, int64_t place,
                             const Rise<typename P::Number>& rise, int row) {
  using T = typename P::Number;
  const Vector<T> lowest = splat(-Constants<T>::largest);
  const Vector<T> shift = splat(rise.shift[row]);
  Vector<T> total = load(sums.total + place * lanes<T>);
  Vector<T> first = {}, second = {}, squares = {}, column = {};
  if constexpr (with_moments) {
    first = load(sums.first + place * lanes<T>);
    second = load(sums.second + place * lanes<T>);
    squares = load(sums.squares + place * lanes<T>);
    column = load(sums.column + place * lanes<T>);
    if (rise.factor[row] != 1) {
      move_moments(first, second, squares, column, total, rise.before[row] - rise.shift[row], rise.factor[row]);
    }
  }
  total *= splat(rise.factor[row]);
  Vector<T> key = ramp<T>() + splat(key_offset + static_cast<T>(range.first * lanes<T>));
  for (int64_t v = range.first; v < range.last; ++v) {
    const Vector<T> t = load(scores + v * lanes<T>) - shift;
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
  store(sums.total + place * lanes<T>, total);
  if constexpr (with_moments) {
    store(sums.first + place * lanes<T>, first);
    store(sums.second + place * lanes<T>, second);
    store(sums.squares + place * lanes<T>, squares);
    store(sums.column + place * lanes<T>, column);
  }
}

// Before the weights take the scores' place: the key of a new largest score is noted, and the score of local key 0.
template <class P>
void note_keys(const typename P::Number* scores, VectorRange range, int64_t first_key, State<P>& state, Batch batch,
               const Rise<typename P::Number>& rise) {
  using T = typename P::Number;
  const int64_t zero = -first_key;
  const bool has_zero = zero >= range.first * lanes<T> && zero < range.last * lanes<T>;
  for (int row = 0; row < batch.count; ++row) {
    const int64_t place = batch.first + row;
    const T* own = scores + place * tile_keys;
    RowMoments& moments = state.moments[place];
    if (rise.here[row] > rise.before[row]) {
      moments.argmax = static_cast<double>(first_key + key_of(rise.here[row], own, range));
    }
    if (has_zero) moments.first_score = own[zero];
  }
}

// Turns rows of scores into weights e^(s - m), where m is a row's largest score of the block so far, and says in
// `rescale` by what factor everything gathered before must shrink.
template <class P, bool with_moments>
void exponentiate_rows(const typename P::Number* scores, typename P::Unit* weights, VectorRange range, const Tile& tile,
                       Partial<P>& partial, Batch batch, const Rise<typename P::Number>& rise,
                       typename P::Number* rescale) {
  const auto key_offset = static_cast<typename P::Number>(tile.index * tile_keys);
  for (int row = 0; row < batch.count; ++row) {
    const int64_t place = batch.first + row;
    exponentiate_row<P, with_moments>(scores + place * tile_keys, weights + place * weight_step<P>, range, key_offset,
                                      partial.sums, place, rise, row);
    partial.state.maximum[place] = rise.after[row];
    rescale[place] = rise.factor[row];
  }
}

// The sums over the lanes of as many rows as a vector has lanes.
template <class T>
inline void sum_lanes(const T* sums, T (&result)[lanes<T>]) {
  Vector<T> rows[lanes<T>];
  for (int row = 0; row < lanes<T>; ++row) rows[row] = load(sums + row * lanes<T>);
  reduce_rows<Add, T>(rows, result);
}

// At the end of a block, whose first key has the local index `first_key`: lanes become numbers.
template <class P>
void gather_lanes(Partial<P>& partial, int64_t rows, int64_t first_key) {
  using T = typename P::Number;
  State<P>& state = partial.state;
  const LaneSums<P>& sums = partial.sums;
  T first[lanes<T>], second[lanes<T>], squares[lanes<T>], column[lanes<T>], total[lanes<T>];
  for (int64_t start = 0; start < rows; start += lanes<T>) {
    sum_lanes(sums.total + start * lanes<T>, total);
    store(state.sum + start, load(total));
    if (!state.moments) continue;
    sum_lanes(sums.first + start * lanes<T>, first);
    sum_lanes(sums.second + start * lanes<T>, second);
    sum_lanes(sums.squares + start * lanes<T>, squares);
    sum_lanes(sums.column + start * lanes<T>, column);
    for (int64_t row = 0; row < smaller(lanes<T>, rows - start); ++row) {
      RowMoments& moments = state.moments[start + row];
      moments.first = first[row];
      moments.second = second[row];
      moments.squares = squares[row];
      moments.column = static_cast<double>(column[row]) + static_cast<double>(first_key) * total[row];
    }
  }
}

// Numbers times a factor of at most 1. A factor that rounded to zero leaves what is not finite as it is: in exact
// arithmetic no factor is zero.
template <class T>
inline Vector<T> shrunk(Vector<T> numbers, T factor) {
  const Vector<T> product = numbers * splat(factor);
  return factor == 0 ? (numbers - numbers == Vector<T>{} ? product : numbers) : product;
}

// Where the maxima of two partial results meet, row by row in the lanes, and by what each shrinks.
template <class T>
struct Junction {
  T after[lanes<T>];
  T shift[lanes<T>];
  T old_factor[lanes<T>];
  T new_factor[lanes<T>];

  Junction(const T* old_maximum, const T* new_maximum) {
    const Vector<T> before = load(old_maximum);
    const Vector<T> here = load(new_maximum);
    const Vector<T> top = here > before ? here : before;
    store(after, top);
    store(shift, subtracted<T>(top));
    store(old_factor, shrinkage<T>(before, top));
    store(new_factor, shrinkage<T>(here, top));
  }
};

template <class P>
void fold_moments(State<P>& state, int64_t row, const State<P>& next, int64_t next_row, double shift, double old_factor,
                  double new_factor) {
  const double before = static_cast<double>(state.maximum[row]);
  const double here = static_cast<double>(next.maximum[next_row]);
  RowMoments& kept = state.moments[row];
  RowMoments added = next.moments[next_row];
  const auto move = [&](RowMoments& moments, double total, double delta, double factor) {
    move_moments(moments.first, moments.second, moments.squares, moments.column, total, delta, factor);
  };
  if (before != shift) move(kept, static_cast<double>(state.sum[row]), before - shift, old_factor);
  if (here != shift) move(added, static_cast<double>(next.sum[next_row]), here - shift, new_factor);
  kept = {kept.first + added.first,
          kept.second + added.second,
          kept.squares + added.squares,
          kept.column + added.column,
          here > before ? added.argmax : kept.argmax,
          added.first_score > kept.first_score ? added.first_score : kept.first_score};
}

// Folds one block's partial result of rows into what the blocks before it gave: both move to the larger maximum.
template <class P>
void fold_rows(State<P>& state, int64_t first_row, const State<P>& next, int64_t first_next, int64_t rows) {
  using T = typename P::Number;
  for (int64_t start = 0; start < rows; start += lanes<T>) {
    const Junction<T> junction(state.maximum + first_row + start, next.maximum + first_next + start);
    for (int64_t lane = 0; lane < smaller(lanes<T>, rows - start); ++lane) {
      const int64_t row = first_row + start + lane;
      const int64_t next_row = first_next + start + lane;
      if (next.visible[next_row] == 0) continue;
      const T old_factor = junction.old_factor[lane];
      const T new_factor = junction.new_factor[lane];
      if (state.moments) {
        fold_moments(state, row, next, next_row, static_cast<double>(junction.shift[lane]), old_factor, new_factor);
      }
      state.maximum[row] = junction.after[lane];
      state.sum[row] = state.sum[row] * old_factor + next.sum[next_row] * new_factor;
      state.visible[row] += next.visible[next_row];
      T* target = state.accumulator + row * state.width;
      const T* source = next.accumulator + next_row * next.width;
      for (int64_t column = 0; column < state.width; column += lanes<T>) {
        // + 0 makes a negative zero positive: hidden keys, which add +0, must not show even there.
        const Vector<T> added = load(source + column) + Vector<T>{};
        const Vector<T> kept = shrunk(load(target + column), old_factor);
        store(target + column,
              new_factor == 0 ? kept + shrunk(added, new_factor) : fma(added, splat(new_factor), kept));
      }
    }
  }
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
