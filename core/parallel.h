// Threads: the OpenMP team that PyTorch has already brought into the process, else a pool of our own.
#pragma once

#include <cstdint>

namespace softlookup {

// Calls body(context, index) for every index in [0, count), on up to `threads` threads; indices are handed out in
// order. A call from inside another, or beside one from another thread, runs on its caller alone.
void parallel_for(int64_t count, int threads, void (*body)(void* context, int64_t index), void* context);

// To be called when the library is loaded: from then on a fork is noticed, whoever forks.
void watch_forks();

// Whether a thread that could help is awake. PyTorch's team spins between calls for milliseconds; our own pool, which
// could not know of others that spin beside it, for a fraction of one, and waking it takes as long.
bool team_is_awake();

// "openmp" or "pool": what the next call would run on.
const char* thread_backend();

}  // namespace softlookup
