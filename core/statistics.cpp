// Everything follows from the moments in float64. Rounding may carry a number past what it can be mathematically; it is
// then put back to the bound, and NaN stays NaN.
#include "statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace softlookup {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

// What a number of a row can be, least and most, and what it is in an empty row.
struct Limit {
  double least;
  double most;
  double at_empty;
};
constexpr Limit limits[statistic_count] = {
    {0.0, infinity, 0.0},              // entropy
    {0.0, 1.0, not_a_number},          // normalized_entropy
    {0.0, 1.0, 0.0},                   // max_weight
    {-infinity, infinity, -infinity},  // max_score
    {0.0, 1.0, 0.0},                   // sum_squares
    {0.0, 1.0, 0.0},                   // jacobian_trace
    {0.0, infinity, 0.0},              // score_variance
    {0.0, 1.0, 1.0},                   // missing_mass
    {0.0, 1.0, 0.0},                   // first_key_mass
    {-infinity, infinity, 0.0},        // distance
};

double log_of_sum(double first, double second) {
  if (second == -infinity) return first;
  if (first == second) return first + std::log(2.0);
  return std::max(first, second) + std::log1p(std::exp(-std::abs(first - second)));
}

// One row's softmax denominator.
struct Normalizer {
  double lse;
  double unit;  // the weight of the largest score: exact also where the scores are so large that lse cannot hold ln(sum
                // p) beside them
  bool empty;
  bool broken;  // the row is NaN
};

Normalizer normalizer_of(const double* moments, double sink) {
  const double top = moments[moment_maximum];
  const double mass = moments[moment_sum];
  Normalizer made;
  made.empty = moments[moment_visible] == 0;
  made.broken = (!made.empty && !std::isfinite(top + mass)) || std::isnan(sink);
  made.lse = made.broken ? not_a_number : made.empty ? sink : log_of_sum(top + std::log(mass), sink);
  made.unit = sink == -infinity ? 1.0 / mass : 1.0 / (mass + std::exp(sink - top));
  return made;
}

// Numbers of a row whose keys are visible and finite.
void measure(const double* moments, const Normalizer& normalizer, double sink, double offset, double* numbers) {
  const double top = moments[moment_maximum];
  const double mass = moments[moment_sum];
  const double visible = moments[moment_visible];
  const double unit = normalizer.unit;
  const double shift = moments[moment_first] / mass;
  const double log_visible = std::log(visible);
  const double entropy = std::log(mass) - shift;
  numbers[statistic_entropy] = entropy > log_visible ? log_visible : entropy;
  numbers[statistic_normalized_entropy] = visible < 2 ? not_a_number : numbers[statistic_entropy] / log_visible;
  numbers[statistic_max_weight] = unit;
  numbers[statistic_max_score] = top;
  numbers[statistic_sum_squares] = moments[moment_squares] * (unit * unit);
  numbers[statistic_jacobian_trace] = mass * unit - numbers[statistic_sum_squares];
  numbers[statistic_score_variance] = moments[moment_second] / mass - shift * shift;
  numbers[statistic_missing_mass] = sink == -infinity ? 0.0 : std::exp(sink - normalizer.lse);
  numbers[statistic_first_key_mass] = std::exp(moments[moment_first_score] - top) * unit;
  numbers[statistic_distance] = offset - moments[moment_column] / mass;
  for (int i = 0; i < statistic_count; ++i) {
    if (numbers[i] < limits[i].least) numbers[i] = limits[i].least;
    if (numbers[i] > limits[i].most) numbers[i] = limits[i].most;
  }
}

// Calls function(row, moments, the head's sink, position of the query minus that of key column 0).
template <class Function>
void for_each_row(const MomentRows& rows, Function function) {
  for (int64_t row = 0; row < rows.batch * rows.heads * rows.queries; ++row) {
    const int64_t query = row % rows.queries;
    const int64_t head = row / rows.queries % rows.heads;
    const int64_t item = row / rows.queries / rows.heads;
    const int64_t start = rows.query_start ? rows.query_start[item * rows.query_start_step] : 0;
    function(row, rows.moments + row * moment_count, rows.sinks ? rows.sinks[head] : -infinity,
             static_cast<double>(start + query - rows.key_start));
  }
}

template <class T>
void make_typed(const MomentRows& rows, const StatisticRows& made) {
  T* target = static_cast<T*>(made.numbers);
  const int64_t count = rows.batch * rows.heads * rows.queries;
  for_each_row(rows, [&](int64_t row, const double* moments, double sink, double offset) {
    const Normalizer normalizer = normalizer_of(moments, sink);
    double numbers[statistic_count];
    if (normalizer.broken) {
      std::fill_n(numbers, statistic_count, not_a_number);
    } else if (normalizer.empty) {
      for (int i = 0; i < statistic_count; ++i) numbers[i] = limits[i].at_empty;
      if (sink == -infinity) numbers[statistic_missing_mass] = 0.0;
    } else {
      measure(moments, normalizer, sink, offset, numbers);
    }
    for (int i = 0; i < statistic_count; ++i) target[i * count + row] = static_cast<T>(numbers[i]);
    made.lse[row] = normalizer.lse;
    made.visible[row] = static_cast<int64_t>(moments[moment_visible]);
    made.argmax[row] = normalizer.broken || normalizer.empty ? -1 : static_cast<int64_t>(moments[moment_argmax]);
  });
}

}  // namespace

void make_statistics(const MomentRows& rows, const StatisticRows& made) {
  if (made.type == Type::float64) {
    make_typed<double>(rows, made);
  } else {
    make_typed<float>(rows, made);
  }
}

void make_normalizers(const MomentRows& rows, double* lse, double* top, double* share) {
  for_each_row(rows, [&](int64_t row, const double* moments, double sink, double) {
    const Normalizer normalizer = normalizer_of(moments, sink);
    lse[row] = normalizer.lse;
    top[row] = normalizer.empty ? -infinity : moments[moment_maximum];
    share[row] = normalizer.empty ? 0.0 : normalizer.broken ? not_a_number : normalizer.unit;
  });
}

}  // namespace softlookup
