// The limit loops, as Python calls them (softlookup.machine): on several threads at once, which start together or not
// at all, timed from the first start to the last end.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.h"
#include "limits.h"
#include "parallel.h"

namespace softlookup {

#if defined(__x86_64__)
namespace x86_64 {
extern const Limits limits;
}
namespace x86_64_v3 {
extern const Limits limits;
}
namespace x86_64_v4 {
extern const Limits limits;
}
namespace x86_64_v4_bf16 {
extern const Limits limits;
}
#if SOFTLOOKUP_AMX
namespace x86_64_v4_amx {
extern const Limits limits;
}
#endif
#elif defined(__aarch64__)
namespace arm64 {
extern const Limits limits;
}
#endif

namespace nb = nanobind;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t line_words = 16;  // of a cache line, which no two threads share

const Limits& limits_of(const std::string& isa) {
#if defined(__x86_64__)
  static const Limits* const all[] = {
      &x86_64::limits,        &x86_64_v3::limits, &x86_64_v4::limits, &x86_64_v4_bf16::limits,
#if SOFTLOOKUP_AMX
      &x86_64_v4_amx::limits,
#endif
  };
#elif defined(__aarch64__)
  static const Limits* const all[] = {&arm64::limits};
#endif
  const std::string name = kernels_named(isa).name;
  for (const Limits* limits : all) {
    if (name == limits->name) return *limits;
  }
  throw std::invalid_argument("no limits of " + name);
}

// Threads that do the same work at the same time.
class Team {
 public:
  Team(int threads, void (*work)(void* context, int index), void* context)
      : work_(work), context_(context), starts_(threads), ends_(threads) {}

  // Seconds from the first start to the last end; NaN if the threads did not come together.
  double seconds() {
    const nb::gil_scoped_release released;
    parallel_for(static_cast<int64_t>(starts_.size()), static_cast<int>(starts_.size()), member, this);
    if (late_.load()) return std::nan("");
    Clock::time_point start = starts_[0];
    Clock::time_point end = ends_[0];
    for (size_t i = 1; i < starts_.size(); ++i) {
      if (starts_[i] < start) start = starts_[i];
      if (ends_[i] > end) end = ends_[i];
    }
    return std::chrono::duration<double>(end - start).count();
  }

 private:
  static void member(void* context, int64_t index) {
    Team& team = *static_cast<Team*>(context);
    team.arrived_.fetch_add(1);
    if (!team.all_here()) {
      team.late_.store(true);
      return;
    }
    team.starts_[index] = Clock::now();
    team.work_(team.context_, static_cast<int>(index));
    team.ends_[index] = Clock::now();
  }

  bool all_here() const {
    const Clock::time_point deadline = Clock::now() + std::chrono::seconds(1);
    while (arrived_.load() < static_cast<int>(starts_.size())) {
      if (late_.load() || Clock::now() > deadline) return false;
    }
    return true;
  }

  void (*work_)(void* context, int index);
  void* context_;
  std::vector<Clock::time_point> starts_;
  std::vector<Clock::time_point> ends_;
  std::atomic<int> arrived_{0};
  std::atomic<bool> late_{false};
};

nb::list limit_loops(const std::string& isa) {
  const Limits& limits = limits_of(isa);
  nb::list loops;
  for (int i = 0; i < limits.loop_count; ++i) {
    const LimitLoop& loop = limits.loops[i];
    loops.append(nb::make_tuple(loop.kind, loop.unroll, loop.operations));
  }
  return loops;
}

nb::tuple run_limit_loop(const std::string& isa, int index, int64_t rounds, int threads) {
  struct Run {
    const LimitLoop& loop;
    int64_t rounds;
    std::atomic<bool> as_expected{true};
  } run{limits_of(isa).loops[index], rounds};
  const auto work = [](void* context, int) {
    Run& run = *static_cast<Run*>(context);
    if (!run.loop.run(run.rounds)) run.as_expected.store(false);
  };
  const double seconds = Team(threads, work, &run).seconds();
  return nb::make_tuple(seconds, run.as_expected.load());
}

// Every thread reads its own consecutive part of the buffer.
nb::tuple run_read_loop(const std::string& isa, int index, nb::handle array, int threads) {
  struct Run {
    const ReadLoop& loop;
    const uint32_t* data;
    int64_t words;
    int threads;
    std::atomic<uint32_t> sum{0};
    int64_t first(int part) const { return part == threads ? words : words / line_words * part / threads * line_words; }
  };
  const auto work = [](void* context, int part) {
    Run& run = *static_cast<Run*>(context);
    const int64_t first = run.first(part);
    run.sum.fetch_add(run.loop.run(run.data + first, run.first(part + 1) - first));
  };
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
  Run run{limits_of(isa).reads[index], static_cast<const uint32_t*>(view.buf), view.len / 4, threads};
  const double seconds = Team(threads, work, &run).seconds();
  PyBuffer_Release(&view);
  return nb::make_tuple(seconds, run.sum.load());
}

}  // namespace

void bind_limits(nb::module_& module) {
  using nb::literals::operator""_a;
  module.attr("MOST_LIMIT_ROUNDS") = most_limit_rounds;
  module.def("limit_loops", limit_loops, "isa"_a);
  module.def("run_limit_loop", run_limit_loop, "isa"_a, "index"_a, "rounds"_a, "threads"_a);
  module.def(
      "read_unrolls",
      [](const std::string& isa) {
        const Limits& limits = limits_of(isa);
        return nb::make_tuple(limits.reads[0].unroll, limits.reads[1].unroll);
      },
      "isa"_a);
  module.def("run_read_loop", run_read_loop, "isa"_a, "index"_a, "array"_a, "threads"_a);
}

}  // namespace softlookup
