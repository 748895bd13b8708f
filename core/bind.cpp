// The module softlookup._core: attention over arrays, and what this build is.
#include <nanobind/stl/vector.h>

#include "call.h"
#include "driver.h"
#include "parallel.h"

using namespace softlookup;

namespace softlookup {
void bind_cache(nb::module_& module);
void bind_limits(nb::module_& module);
void bind_statistics(nb::module_& module);
}  // namespace softlookup

namespace {

void read_values(Call& call, nb::handle v, Type type) {
  const Buffer& value = call.open(v);
  call.problem.value = value.tensor(type, call.problem.leading_axes);
  call.problem.value_width = value.size(-1);
}

void attend_arrays(nb::handle q, nb::handle k, nb::handle v, nb::handle out, int type, int out_type,
                   const nb::tuple& scoring, nb::handle moments, int threads, nb::handle isa) {
  Call call;
  read_problem(call, q, k, out, static_cast<Type>(type), static_cast<Type>(out_type), scoring);
  read_values(call, v, static_cast<Type>(type));
  if (!moments.is_none()) call.problem.moments = call.open(moments, PyBUF_STRIDES | PyBUF_WRITABLE).data<double>();
  const Arithmetic& arithmetic = *kernels_of(isa).arithmetic[type];
  run(call, [&](const Problem& problem) { attend(problem, arithmetic, threads); });
}

void score_arrays(nb::handle q, nb::handle k, nb::handle out, int type, const nb::tuple& scoring, nb::handle rows,
                  int64_t head_offset, int threads, nb::handle isa) {
  Call call;
  const Type out_type = static_cast<Type>(type) == Type::float64 ? Type::float64 : Type::float32;
  read_problem(call, q, k, out, static_cast<Type>(type), out_type, scoring);
  call.problem.rows = call.open(rows).data<const int64_t>();
  call.problem.head_offset = head_offset;
  const Arithmetic& arithmetic = *kernels_of(isa).arithmetic[type];
  run(call, [&](const Problem& problem) { scores(problem, arithmetic, threads); });
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
  const Arithmetic& arithmetic = *kernels_of(isa).arithmetic[type];
  run(call, [&](const Problem& problem) { differentiate(problem, gradients, arithmetic, threads); });
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
  bind_cache(module);
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
