// The module softlookup._core. Python has checked every argument before; here they are only read. Arrays come through
// the buffer protocol, so that read-only arrays and any strides pass without a copy.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "dispatch.h"
#include "driver.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace softlookup;

namespace softlookup {
void bind_limits(nb::module_& module);
}

namespace {

class Buffer {
 public:
  explicit Buffer(nb::handle array, int flags = PyBUF_STRIDES) {
    if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  int axes() const { return view_.ndim; }
  int64_t shape(int axis) const { return view_.shape[axis < 0 ? axis + view_.ndim : axis]; }
  int64_t stride(int axis) const { return view_.strides[axis < 0 ? axis + view_.ndim : axis]; }
  template <class T>
  T* data() const {
    return static_cast<T*>(view_.buf);
  }

  Tensor tensor(Type type) const {
    Tensor tensor;
    tensor.data = data<char>();
    tensor.type = type;
    tensor.column = stride(-1);
    tensor.row = stride(-2);
    tensor.head = stride(-3);
    for (int axis = 0; axis < axes() - 3; ++axis) tensor.leading[axis] = stride(axis);
    return tensor;
  }

 private:
  Py_buffer view_;
};

// What a run needs beside the problem: open buffers, the mask's steps, the predicates and what they raised.
struct Call {
  Problem problem;
  std::deque<Buffer> buffers;
  std::vector<MaskNode> mask;
  std::vector<nb::object> predicates;
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
  step = buffer.shape(0) == 1 ? 0 : 1;
  return buffer.data<const int64_t>();
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
    node.dense = call.open(step[1]).tensor(Type::float32);
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

// What `attend` and `scores` have in common.
void read_problem(Call& call, nb::handle q, nb::handle k, nb::handle out, Type type, Type out_type, double scale,
                  double softcap, nb::handle bias, Type bias_type, nb::handle q_start, int64_t k_start,
                  nb::handle mask) {
  Problem& problem = call.problem;
  const Buffer& query = call.open(q);
  const Buffer& key = call.open(k);
  const Buffer& output = call.open(out, PyBUF_STRIDES | PyBUF_WRITABLE);
  problem.leading_axes = query.axes() - 3;
  for (int axis = 0; axis < problem.leading_axes; ++axis) {
    problem.leading_shape[axis] = query.shape(axis);
    problem.batch *= query.shape(axis);
  }
  problem.query_heads = query.shape(-3);
  problem.key_heads = key.shape(-3);
  problem.queries = query.shape(-2);
  problem.keys = key.shape(-2);
  problem.width = query.shape(-1);
  problem.output_rows = output.shape(-2);
  problem.query = query.tensor(type);
  problem.key = key.tensor(type);
  problem.out = output.tensor(out_type);
  problem.scale = scale;
  problem.softcap = softcap;
  if (!bias.is_none()) problem.bias = call.open(bias).tensor(bias_type);
  problem.query_start = per_item(call, q_start, problem.query_start_step);
  problem.key_start = k_start;
  read_mask(call, mask);
  problem.predicate = predicate;
  problem.context = &call;
  problem.stopped = stopped;
}

void read_values(Call& call, nb::handle v, Type type) {
  const Buffer& value = call.open(v);
  call.problem.value = value.tensor(type);
  call.problem.value_width = value.shape(-1);
}

const double* doubles(Call& call, nb::handle array) {
  return array.is_none() ? nullptr : call.open(array).data<const double>();
}

template <class Function>
void run(Call& call, const std::optional<std::string>& isa, int type, int threads, Function function) {
  const Kernels& kernels = kernels_named(isa.value_or(""));
  {
    const nb::gil_scoped_release released;
    function(call.problem, kernels, static_cast<Type>(type), threads);
  }
  if (call.error) std::rethrow_exception(call.error);
}

void attend_arrays(nb::handle q, nb::handle k, nb::handle v, nb::handle out, int type, int out_type, double scale,
                   double softcap, nb::handle bias, int bias_type, nb::handle sinks, nb::handle q_start,
                   int64_t k_start, nb::handle mask, nb::handle moments, int threads,
                   const std::optional<std::string>& isa) {
  Call call;
  read_problem(call, q, k, out, static_cast<Type>(type), static_cast<Type>(out_type), scale, softcap, bias,
               static_cast<Type>(bias_type), q_start, k_start, mask);
  read_values(call, v, static_cast<Type>(type));
  call.problem.sinks = doubles(call, sinks);
  if (!moments.is_none()) call.problem.moments = call.open(moments, PyBUF_STRIDES | PyBUF_WRITABLE).data<double>();
  run(call, isa, type, threads, attend);
}

void score_arrays(nb::handle q, nb::handle k, nb::handle out, int type, double scale, double softcap, nb::handle bias,
                  int bias_type, nb::handle q_start, int64_t k_start, nb::handle mask, nb::handle rows,
                  int64_t head_offset, int threads, const std::optional<std::string>& isa) {
  Call call;
  const Type out_type = static_cast<Type>(type) == Type::float64 ? Type::float64 : Type::float32;
  read_problem(call, q, k, out, static_cast<Type>(type), out_type, scale, softcap, bias, static_cast<Type>(bias_type),
               q_start, k_start, mask);
  if (!rows.is_none()) call.problem.rows = call.open(rows).data<const int64_t>();
  call.problem.head_offset = head_offset;
  run(call, isa, type, threads, scores);
}

Tensor gradient(Call& call, nb::handle array, int type) {
  return array.is_none() ? Tensor() : call.open(array, PyBUF_STRIDES | PyBUF_WRITABLE).tensor(static_cast<Type>(type));
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
                          nb::handle share, int type, int out_type, int dout_type, int gradient_type, nb::handle dlse,
                          nb::handle delta, nb::handle dq, nb::handle dk, nb::handle dv, nb::handle dbias, double scale,
                          double softcap, nb::handle bias, int bias_type, nb::handle q_start, int64_t k_start,
                          nb::handle mask, int threads, const std::optional<std::string>& isa) {
  Call call;
  read_problem(call, q, k, out, static_cast<Type>(type), static_cast<Type>(out_type), scale, softcap, bias,
               static_cast<Type>(bias_type), q_start, k_start, mask);
  read_values(call, v, static_cast<Type>(type));
  Gradients gradients;
  gradients.output = call.problem.out;
  gradients.output_slope = call.open(dout).tensor(static_cast<Type>(dout_type));
  gradients.top = doubles(call, top);
  gradients.share = doubles(call, share);
  gradients.lse_slope = doubles(call, dlse);
  gradients.delta = call.open(delta, PyBUF_STRIDES | PyBUF_WRITABLE).data<double>();
  gradients.query = gradient(call, dq, gradient_type);
  gradients.key = gradient(call, dk, gradient_type);
  gradients.value = gradient(call, dv, gradient_type);
  gradients.bias = gradient(call, dbias, static_cast<int>(type == 1 ? Type::float64 : Type::float32));
  gradients.bias_is_shared = is_shared(call.problem, gradients.bias);
  run(call, isa, type, threads, [&](const Problem& problem, const Kernels& kernels, Type of, int team) {
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
  module.def("attend", attend_arrays, "q"_a, "k"_a, "v"_a, "out"_a, "type"_a, "out_type"_a, nb::kw_only(), "scale"_a,
             "softcap"_a, "bias"_a.none() = nb::none(), "bias_type"_a = 0, "sinks"_a.none() = nb::none(), "q_start"_a,
             "k_start"_a, "mask"_a.none() = nb::none(), "moments"_a.none() = nb::none(), "threads"_a,
             "isa"_a.none() = nb::none());
  module.def("scores", score_arrays, "q"_a, "k"_a, "out"_a, "type"_a, nb::kw_only(), "scale"_a, "softcap"_a,
             "bias"_a.none() = nb::none(), "bias_type"_a = 0, "q_start"_a, "k_start"_a, "mask"_a.none() = nb::none(),
             "rows"_a.none() = nb::none(), "head_offset"_a = 0, "threads"_a, "isa"_a.none() = nb::none());
  module.def("differentiate", differentiate_arrays, "q"_a, "k"_a, "v"_a, "out"_a, "dout"_a, "top"_a, "share"_a,
             "type"_a, "out_type"_a, "dout_type"_a, "gradient_type"_a, nb::kw_only(), "dlse"_a.none() = nb::none(),
             "delta"_a, "dq"_a.none() = nb::none(), "dk"_a.none() = nb::none(), "dv"_a.none() = nb::none(),
             "dbias"_a.none() = nb::none(), "scale"_a, "softcap"_a, "bias"_a.none() = nb::none(), "bias_type"_a = 0,
             "q_start"_a, "k_start"_a, "mask"_a.none() = nb::none(), "threads"_a, "isa"_a.none() = nb::none());
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
