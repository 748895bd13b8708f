// What the functions of softlookup._core that run kernels have in common: how the arguments of a call become a problem,
// and how what stops it comes back. Python has checked every argument before; here they are only read. Arrays come
// through the buffer protocol, so that read-only arrays and any strides pass without a copy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "buffer.h"
#include "dispatch.h"

namespace softlookup {

namespace nb = nanobind;

// What a run needs beside the problem: open buffers, the mask's steps, the predicates and what they raised.
struct Call {
  Problem problem;
  std::deque<Buffer> buffers;
  std::vector<MaskNode> mask;
  std::vector<nb::object> predicates;
  int64_t query_start = 0;  // where it is one number for all
  std::atomic<bool> stopped{false};
  std::mutex mutex;
  std::exception_ptr error;
  std::thread::id caller = std::this_thread::get_id();
  std::chrono::steady_clock::time_point next_look = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);

  // The first error is the one that is raised.
  void stop(std::exception_ptr reason) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!error) error = reason;
    stopped.store(true);
  }

  const Buffer& open(nb::handle array, int flags = PyBUF_STRIDES) {
    buffers.emplace_back(array, flags);
    return buffers.back();
  }
  Tensor tensor(nb::handle array, Type type, int flags = PyBUF_STRIDES) {
    return open(array, flags).tensor(type, problem.leading_axes);
  }
};

const double* doubles(Call& call, nb::handle array);

// `Scoring` of softlookup._scoring: its fields in their order.
void read_scoring(Call& call, const nb::tuple& scoring);

// What a problem says of its queries and its output, which has all leading axes; what other arrays lack is broadcast.
void read_queries(Call& call, nb::handle q, nb::handle out, Type type, Type out_type);

// The same with keys from an array, and the scoring.
void read_problem(Call& call, nb::handle q, nb::handle k, nb::handle out, Type type, Type out_type,
                  const nb::tuple& scoring);

inline const Kernels& kernels_of(nb::handle isa) {
  return kernels_named(isa.is_none() ? std::string() : nb::cast<std::string>(isa));
}

// Calls function(problem) without the interpreter's lock, and raises what stopped it.
template <class Function>
void run(Call& call, Function function) {
  {
    const nb::gil_scoped_release released;
    function(call.problem);
  }
  if (call.error) std::rethrow_exception(call.error);
}

}  // namespace softlookup
