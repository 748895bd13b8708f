// Memory of the forward pass: a partial result (state), which may travel between threads, and a thread's scratch. Both
// are cut from one piece of memory that the driver provides; nothing is allocated here.
#pragma once

#include "storage.h"
#include "tiles.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

// Whether none of the numbers, whole vectors of them, is NaN or infinite.
template <class T>
inline bool all_finite(const T* numbers, int64_t count) {
  Vector<T> nothing = {};
  for (int64_t i = 0; i < count; i += lanes<T>) nothing += load(numbers + i) - load(numbers + i);
  return sum_of<T>(nothing) == T{0};
}

// Cuts aligned arrays from a piece of memory; started at null it only measures.
class Carver {
 public:
  explicit Carver(char* memory) : start_(memory), next_(memory) {}

  template <class T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(next_);
    next_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return taken;
  }
  int64_t bytes() const { return next_ - start_; }

 private:
  char* start_;
  char* next_;
};

// Sums over the visible keys of one row beside the maximum and the sum, with t = s - maximum and p = e^t.
struct RowMoments {
  double first;        // sum t p
  double second;       // sum t^2 p
  double squares;      // sum p^2
  double column;       // sum p times the key's local index
  double argmax;       // lowest local index of the largest score; -1 where there is none
  double first_score;  // score of local key 0; -inf where hidden
};

// A partial lookup of some rows: softmax numerators of a set of keys, and the weighted sum of its values.
template <class P>
struct State {
  using T = typename P::Number;
  T* maximum;           // [rows], -inf before any key
  T* sum;               // [rows]
  int64_t* visible;     // [rows]; emptiness comes from here, never from a score
  T* accumulator;       // [rows, padded width of values]
  RowMoments* moments;  // [rows], or null
  int64_t width;

  State(const Problem& problem, int64_t rows, Carver& carver) : width(padded_width<P>(problem.value_width)) {
    // Whole vectors of rows are read and written.
    maximum = carver.take<T>(rows + lanes<T>);
    sum = carver.take<T>(rows + lanes<T>);
    visible = carver.take<int64_t>(rows);
    accumulator = carver.take<T>(rows * width);
    RowMoments* taken = carver.take<RowMoments>(problem.moments ? rows : 0);
    moments = problem.moments ? taken : nullptr;
  }

  void reset(int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
      maximum[row] = -Constants<T>::infinity;
      sum[row] = 0;
      visible[row] = 0;
      if (moments) moments[row] = {0, 0, 0, 0, -1, -Constants<double>::infinity};
    }
    std::memset(accumulator, 0, static_cast<size_t>(rows * width) * sizeof(T));
  }
};

// What one block adds to a row, lane by lane, so that a tile reduces nothing but its maxima.
template <class P>
struct LaneSums {
  using T = typename P::Number;
  T* total;  // [rows][lanes], as the others: sum p
  T* first;  // sum t p, and so on; no memory where no moments are asked for
  T* second;
  T* squares;
  T* column;  // with the key's index within the block

  LaneSums(const Problem& problem, int64_t rows, Carver& carver)
      : total(carver.take<T>(rows * lanes<T>)),
        first(carver.take<T>(problem.moments ? rows * lanes<T> : 0)),
        second(carver.take<T>(problem.moments ? rows * lanes<T> : 0)),
        squares(carver.take<T>(problem.moments ? rows * lanes<T> : 0)),
        column(carver.take<T>(problem.moments ? rows * lanes<T> : 0)) {}

  void reset(int64_t rows, bool with_moments) {
    const size_t bytes = static_cast<size_t>(rows * lanes<T>) * sizeof(T);
    std::memset(total, 0, bytes);
    if (!with_moments) return;
    std::memset(first, 0, bytes);
    std::memset(second, 0, bytes);
    std::memset(squares, 0, bytes);
    std::memset(column, 0, bytes);
  }
};

// One block of one stack: its state is whole once the lanes are gathered.
template <class P>
struct Partial {
  State<P> state;
  LaneSums<P> sums;

  Partial(const Problem& problem, int64_t rows, Carver& carver)
      : state(problem, rows, carver), sums(problem, rows, carver) {}

  void reset(int64_t rows) {
    state.reset(rows);
    sums.reset(rows, state.moments != nullptr);
  }
};

// Rows of the strips that take turns at one panel of keys or values while it is in the nearest cache.
template <class P>
constexpr int stack_rows = P::stack_strips * P::strip_rows;

template <class P>
struct Scratch {
  using T = typename P::Number;
  using Unit = typename P::Unit;

  Unit* queries;        // strip after strip, each [units of d_k][rows of the strip]
  Unit* keys;           // one block: [panels][units of d_k][panel_lanes]
  Unit* values;         // one block: [tiles][panels of d_v][units of keys][panel_lanes]
  T* scores;            // [tiles_at_once][stack_rows][tile_keys]
  Unit* weights;        // [tiles_at_once][stack_rows][weight_step], perhaps over the scores
  T* bias;              // [stack_rows][tile_keys]
  Bits* bits;           // [tiles_at_once][stack_rows]
  T* rescale;           // [stack_rows]
  Unit* clean_values;   // one panel of a tile without what is hidden
  Unit* clean_weights;  // [weight_step]
  char* copies;         // rows gathered from strided arrays
  uint64_t* predicted;  // [predicates][rows][block_keys / 64]
  int64_t* heads;       // [rows]
  int64_t* positions;   // [rows]
  // Where codes are multiplied, else without memory.
  T* row_scale;        // [rows] what the product of one code of a query and one of a key is worth
  T* row_offset;       // [rows] what the means of the keys add to every score
  int32_t* row_start;  // [strip][key_groups][rows of the strip] where the sums of a query's products start
  Unit* weight_codes;  // [stack_rows][tile_units]
  T* weight_scale;     // [stack_rows]
  Partial<P> partial;  // one block of one stack

  Scratch(const Problem& problem, int64_t rows, Carver& carver)
      : queries(carver.take<Unit>(rows * units_of<P>(problem.width) + lanes<Unit>)),
        keys(carver.take<Unit>(block_keys * units_of<P>(problem.width))),
        values(carver.take<Unit>(block_units<P> * padded_width<P>(problem.value_width))),
        scores(carver.take<T>(tiles_at_once<P> * stack_rows<P> * tile_keys)),
        weights(P::weights_over_scores ? reinterpret_cast<Unit*>(scores)
                                       : carver.take<Unit>(stack_rows<P> * tile_units<P>)),
        bias(carver.take<T>(problem.bias.data ? stack_rows<P> * tile_keys : 0)),
        bits(carver.take<Bits>(tiles_at_once<P> * stack_rows<P>)),
        rescale(carver.take<T>(stack_rows<P>)),
        clean_values(carver.take<Unit>(tile_units<P> * panel_lanes<P>)),
        clean_weights(carver.take<Unit>(weight_step<P>)),
        copies(carver.take<char>(gathered_rows<P> * 8 * larger(problem.width, problem.value_width))),
        predicted(carver.take<uint64_t>(problem.predicates * rows * (block_keys / 64))),
        heads(carver.take<int64_t>(problem.predicates ? rows : 0)),
        positions(carver.take<int64_t>(problem.predicates ? rows : 0)),
        row_scale(carver.take<T>(P::coded ? rows : 0)),
        row_offset(carver.take<T>(P::coded ? rows : 0)),
        row_start(carver.take<int32_t>(P::coded ? rows * problem.pages.key_groups : 0)),
        weight_codes(carver.take<Unit>(P::coded ? stack_rows<P> * tile_units<P> : 0)),
        weight_scale(carver.take<T>(P::coded ? stack_rows<P> + lanes<T> : 0)),
        partial(problem, stack_rows<P>, carver) {}
};

template <class P>
int64_t scratch_bytes(const Problem& problem, int64_t rows) {
  Carver carver(nullptr);
  Scratch<P> scratch(problem, rows, carver);
  return carver.bytes();
}

template <class P>
int64_t state_bytes(const Problem& problem, int64_t rows) {
  Carver carver(nullptr);
  State<P> state(problem, rows, carver);
  return carver.bytes();
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
