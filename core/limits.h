// Loops that do one thing as fast as the machine can: the limits that softlookup.machine measures, and that the
// benchmarks set every time beside. Plain structs, as in kernels.h.
#pragma once

#include <cstdint>

namespace softlookup {

// A loop over independent chains of one operation. Each kind comes in two unrolls, whose speeds must agree: one that is
// spilled, bound by latency or optimised away would not.
struct LimitLoop {
  const char* kind;             // "fma_float32", ...
  int unroll;                   // chains
  int64_t operations;           // of one round; a multiply-add is two
  bool (*run)(int64_t rounds);  // whether the chains ended at the numbers that they must reach
};

// More rounds would carry a float32 chain past the integers it can hold.
constexpr int64_t most_limit_rounds = int64_t{1} << 21;

// Reads memory and does no more with it than adding it up.
struct ReadLoop {
  int unroll;  // vectors of a stream
  uint32_t (*run)(const uint32_t* data, int64_t count);
};
constexpr int read_loop_count = 2;

// The loops of one instruction set.
struct Limits {
  const char* name;
  const LimitLoop* loops;
  int loop_count;
  ReadLoop reads[read_loop_count];
};

}  // namespace softlookup
