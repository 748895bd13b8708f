// The module softlookup._core. Python has checked every argument before; here they are only read. Arrays come through
// the buffer protocol, so that read-only arrays and any strides pass without a copy.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "buffer.h"
#include "dispatch.h"
#include "driver.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace softlookup;

namespace softlookup {
void bind_limits(nb::module_& module);
void bind_statistics(nb::module_& module);
}  // namespace softlookup

namespace {

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

// A fresh int64 array of the given shape, filled from `values` (or with one value throughout).
nb::object index_array(const int64_t* values, int64_t rows, int64_t columns, int64_t first, int64_t step) {
  nb::object array = nb::module_::import_("numpy").attr("empty")(nb::make_tuple(rows, columns), "int64");
  const Buffer buffer(array, PyBUF_STRIDES | PyBUF_WRITABLE);
  for (int64_t i = 0; i < rows * columns; ++i) buffer.data<int64_t>()[i] = values ? values[i] : first + i * step;
  return array;
}

// The predicate answers with a contiguous bool array [rows, keys]: Python has checked what the user's function
// returned.
void ask(const Call& call, const PredicateCall& asked) {
  const nb::object answer = call.predicates[asked.predicate](
      index_array(nullptr, 1, 1, asked.batch, 0), index_array(asked.heads, asked.rows, 1, 0, 0),
      index_array(asked.queries, asked.rows, 1, 0, 0), index_array(nullptr, 1, asked.keys, asked.first_key, 1));
  const Buffer seen(answer);
  for (int64_t row = 0; row < asked.rows; ++row) {
    for (int64_t key = 0; key < asked.keys; ++key) {
      const int64_t bit = asked.first_bit + key;
      const uint64_t set = seen.data<char>()[row * asked.keys + key] != 0;
      asked.bits[row * (block_keys / 64) + bit / 64] |= set << (bit % 64);
    }
  }
}

bool predicate(void* context, const PredicateCall& asked) {
  Call& call = *static_cast<Call*>(context);
  const nb::gil_scoped_acquire gil;
  try {
    ask(call, asked);
    return true;
  } catch (...) {
    call.stop(std::current_exception());
    return false;
  }
}

// Whether to give up. The thread that called looks now and then whether the user pressed Ctrl-C meanwhile.
bool stopped(void* context) {
  Call& call = *static_cast<Call*>(context);
  const auto now = std::chrono::steady_clock::now();
  if (std::this_thread::get_id() == call.caller && now > call.next_look) {
    call.next_look = now + std::chrono::milliseconds(50);
    const nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) call.stop(std::make_exception_ptr(nb::python_error()));
  }
  return call.stopped.load(std::memory_order_relaxed);
}

int64_t limit(nb::handle value) { return value.is_none() ? unlimited : std::min(unlimited, nb::cast<int64_t>(value)); }

// An array of one value a batch item, or one for all.
const int64_t* per_item(Call& call, nb::handle array, int64_t& step) {
  if (array.is_none()) return nullptr;
  const Buffer& buffer = call.open(array);
  step = buffer.size(-1) == 1 ? 0 : 1;
  return buffer.data<const int64_t>();
}

const double* doubles(Call& call, nb::handle array) {
  return array.is_none() ? nullptr : call.open(array).data<const double>();
}

MaskNode mask_node(Call& call, const nb::tuple& step) {
  const std::string kind = nb::cast<std::string>(step[0]);
  MaskNode node;
  if (kind == "window") {
    node.kind = MaskKind::window;
    node.left = limit(step[1]);
    node.right = limit(step[2]);
  } else if (kind == "lengths") {
    node.kind = MaskKind::lengths;
    node.key_lengths = per_item(call, step[1], node.key_lengths_step);
    node.query_lengths = per_item(call, step[2], node.query_lengths_step);
    node.padded_left = nb::cast<std::string>(step[3]) == "left";
  } else if (kind == "dense") {
    node.kind = MaskKind::dense;
    node.dense = call.tensor(step[1], Type::float32);
  } else if (kind == "predicate") {
    node.kind = MaskKind::predicate;
    node.predicate = static_cast<int>(call.predicates.size());
    call.predicates.push_back(nb::borrow(step[1]));
  } else if (kind == "and") {
    node.kind = MaskKind::conjunction;
  } else if (kind == "or") {
    node.kind = MaskKind::disjunction;
  } else if (kind == "not") {
    node.kind = MaskKind::negation;
  } else if (kind != "full") {
    throw nb::value_error(("unknown mask step '" + kind + "'").c_str());
  }
  return node;
}

void read_mask(Call& call, nb::handle mask) {
  if (mask.is_none()) return;
  for (nb::handle step : nb::borrow<nb::list>(mask)) call.mask.push_back(mask_node(call, nb::borrow<nb::tuple>(step)));
  if (call.mask.size() > most_mask_nodes) throw nb::value_error("the mask has too many parts");
  call.problem.mask = call.mask.data();
  call.problem.mask_nodes = static_cast<int>(call.mask.size());
  call.problem.predicates = static_cast<int>(call.predicates.size());
}

// `Scoring` of softlookup._scoring: its fields in their order.
void read_scoring(Call& call, const nb::tuple& scoring) {
  Problem& problem = call.problem;
  problem.scale = nb::cast<double>(scoring[0]);
  problem.softcap = nb::cast<double>(scoring[1]);
  const nb::object bias = scoring[2];
  if (!bias.is_none()) problem.bias = call.tensor(bias, static_cast<Type>(nb::cast<int>(scoring[3])));
  problem.sinks = doubles(call, scoring[4]);
  const nb::object start = scoring[5];
  if (PyLong_Check(start.ptr())) {
    call.query_start = nb::cast<int64_t>(start);
    problem.query_start = &call.query_start;
  } else {
    problem.query_start = per_item(call, start, problem.query_start_step);
  }
  problem.key_start = nb::cast<int64_t>(scoring[6]);
  read_mask(call, scoring[7]);
}

// What all functions have in common. `out` has all leading axes; what other arrays lack is broadcast.
void read_problem(Call& call, nb::handle q, nb::handle k, nb::handle out, Type type, Type out_type,
                  const nb::tuple& scoring) {
  Problem& problem = call.problem;
  const Buffer& output = call.open(out, PyBUF_STRIDES | PyBUF_WRITABLE);
  problem.leading_axes = std::max(0, output.axes() - 3);
  for (int axis = 0; axis < problem.leading_axes; ++axis) {
    problem.leading_shape[axis] = output.size(axis - output.axes());
    problem.batch *= problem.leading_shape[axis];
  }
  problem.output_rows = output.size(-2);
  problem.out = output.tensor(out_type, problem.leading_axes);
  const Buffer& query = call.open(q);
  problem.query_heads = query.size(-3);
  problem.queries = query.size(-2);
  problem.width = query.size(-1);
  problem.query = query.tensor(type, problem.leading_axes);
  const Buffer& key = call.open(k);
  problem.key_heads = key.size(-3);
  problem.keys = key.size(-2);
  problem.key = key.tensor(type, problem.leading_axes);
  read_scoring(call, scoring);
  problem.predicate = predicate;
  problem.context = &call;
  problem.stopped = stopped;
}

void read_values(Call& call, nb::handle v, Type type) {
  const Buffer& value = call.open(v);
  call.problem.value = value.tensor(type, call.problem.leading_axes);
  call.problem.value_width = value.size(-1);
}

template <class Function>
void run(Call& call, nb::handle isa, Type type, int threads, Function function) {
  const Kernels& kernels = kernels_named(isa.is_none() ? std::string() : nb::cast<std::string>(isa));
  {
    const nb::gil_scoped_release released;
    function(call.problem, kernels, type, threads);
  }
  if (call.error) std::rethrow_exception(call.error);
}

void attend_arrays(nb::handle q, nb::handle k, nb::handle v, nb::handle out, int type, int out_type,
                   const nb::tuple& scoring, nb::handle moments, int threads, nb::handle isa) {
  Call call;
  read_problem(call, q, k, out, static_cast<Type>(type), static_cast<Type>(out_type), scoring);
  read_values(call, v, static_cast<Type>(type));
  if (!moments.is_none()) call.problem.moments = call.open(moments, PyBUF_STRIDES | PyBUF_WRITABLE).data<double>();
  run(call, isa, static_cast<Type>(type), threads, attend);
}

void score_arrays(nb::handle q, nb::handle k, nb::handle out, int type, const nb::tuple& scoring, nb::handle rows,
                  int64_t head_offset, int threads, nb::handle isa) {
  Call call;
  const Type out_type = static_cast<Type>(type) == Type::float64 ? Type::float64 : Type::float32;
  read_problem(call, q, k, out, static_cast<Type>(type), out_type, scoring);
  call.problem.rows = call.open(rows).data<const int64_t>();
  call.problem.head_offset = head_offset;
  run(call, isa, static_cast<Type>(type), threads, scores);
}

Tensor gradient(Call& call, nb::handle array, int type) {
  return array.is_none() ? Tensor() : call.tensor(array, static_cast<Type>(type), PyBUF_STRIDES | PyBUF_WRITABLE);
}

// Whether several heads or batch items of the run add to one number.
bool is_shared(const Problem& problem, const Tensor& bias) {
  bool shared = problem.query_heads > 1 && bias.head == 0;
  for (int axis = 0; axis < problem.leading_axes; ++axis) {
    shared = shared || (problem.leading_shape[axis] > 1 && bias.leading[axis] == 0);
  }
  return shared;
}

void differentiate_arrays(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle dout, nb::handle top,
                          nb::handle share, int type, int out_type, int dout_type, int gradient_type,
                          const nb::tuple& scoring, nb::handle dlse, nb::handle delta, nb::handle dq, nb::handle dk,
                          nb::handle dv, nb::handle dbias, int threads, nb::handle isa) {
  Call call;
  read_problem(call, q, k, out, static_cast<Type>(type), static_cast<Type>(out_type), scoring);
  read_values(call, v, static_cast<Type>(type));
  Gradients gradients;
  gradients.output = call.problem.out;
  gradients.output_slope = call.tensor(dout, static_cast<Type>(dout_type));
  gradients.top = doubles(call, top);
  gradients.share = doubles(call, share);
  gradients.lse_slope = doubles(call, dlse);
  gradients.delta = call.open(delta, PyBUF_STRIDES | PyBUF_WRITABLE).data<double>();
  gradients.query = gradient(call, dq, gradient_type);
  gradients.key = gradient(call, dk, gradient_type);
  gradients.value = gradient(call, dv, gradient_type);
  gradients.bias = gradient(call, dbias, static_cast<int>(type == 1 ? Type::float64 : Type::float32));
  gradients.bias_is_shared = is_shared(call.problem, gradients.bias);
  run(call, isa, static_cast<Type>(type), threads,
      [&](const Problem& problem, const Kernels& kernels, Type of, int team) {
        differentiate(problem, gradients, kernels, of, team);
      });
}

std::vector<std::string> names(const std::vector<const Kernels*>& kernels) {
  std::vector<std::string> result;
  for (const Kernels* one : kernels) result.emplace_back(one->name);
  return result;
}

}  // namespace

NB_MODULE(_core, module) {
  using nb::literals::operator""_a;
  watch_forks();
  module.doc() = "The compiled core of softlookup. Private: softlookup checks what it passes here.";
  module.attr("MOMENTS") = static_cast<int>(moment_count);
  module.attr("MOST_MASK_STEPS") = most_mask_nodes;
  module.def("attend", attend_arrays, "q"_a, "k"_a, "v"_a, "out"_a, "type"_a, "out_type"_a, "scoring"_a,
             "moments"_a.none(), "threads"_a, "isa"_a.none());
  module.def("scores", score_arrays, "q"_a, "k"_a, "out"_a, "type"_a, "scoring"_a, "rows"_a, "head_offset"_a,
             "threads"_a, "isa"_a.none());
  module.def("differentiate", differentiate_arrays, "q"_a, "k"_a, "v"_a, "out"_a, "dout"_a, "top"_a, "share"_a,
             "type"_a, "out_type"_a, "dout_type"_a, "gradient_type"_a, "scoring"_a, "dlse"_a.none(), "delta"_a,
             "dq"_a.none(), "dk"_a.none(), "dv"_a.none(), "dbias"_a.none(), "threads"_a, "isa"_a.none());
  bind_statistics(module);
  bind_limits(module);
  module.def("isas", [] { return names(usable_kernels()); });
  module.def("compiled_isas", [] { return names(compiled_kernels()); });
  module.def("default_isa", [] { return std::string(kernels_named("").name); });
  module.def("thread_backend", thread_backend);
  module.def("compiler", [] {
#if defined(__clang__)
    return "clang " __clang_version__;
#else
    return "gcc " __VERSION__;
#endif
  });
}
