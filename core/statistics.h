// Statistics of rows of weights, from the moments that the forward pass gathers, in float64. For a row with scores s_j
// over its visible keys, m = max s_j and p_j = e^(s_j - m), these are m, sum p, sum t p, sum t^2 p, sum p^2, sum j p
// and so on (see `Moment`), without the sink.
#pragma once

#include "kernels.h"

namespace softlookup {

// The order is the one that Python reads.
enum Statistic : int {
  statistic_entropy,
  statistic_normalized_entropy,
  statistic_max_weight,
  statistic_max_score,
  statistic_sum_squares,
  statistic_jacobian_trace,
  statistic_score_variance,
  statistic_missing_mass,
  statistic_first_key_mass,
  statistic_distance,
  statistic_count
};

// Rows [batch, heads, queries], and what their statistics depend on beside the moments.
struct MomentRows {
  const double* moments = nullptr;  // [batch, heads, queries, moment_count]
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t queries = 0;
  const double* sinks = nullptr;  // [heads], or null
  const int64_t* query_start = nullptr;
  int64_t query_start_step = 0;
  int64_t key_start = 0;
};

// Arrays of rows, but for numbers [statistic_count, rows], which are of the given type, float32 or float64.
struct StatisticRows {
  void* numbers;
  Type type;
  double* lse;
  int64_t* visible;
  int64_t* argmax;
};

void make_statistics(const MomentRows& rows, const StatisticRows& made);

// What the backward pass reads of every row: the log of the denominator, the largest score, -inf where the row is
// empty, and the weight of that score.
void make_normalizers(const MomentRows& rows, double* lse, double* top, double* share);

}  // namespace softlookup
