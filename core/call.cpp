#include "call.h"

#include <algorithm>

namespace softlookup {
namespace {

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

}  // namespace

const double* doubles(Call& call, nb::handle array) {
  return array.is_none() ? nullptr : call.open(array).data<const double>();
}

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

void read_queries(Call& call, nb::handle q, nb::handle out, Type type, Type out_type) {
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
  problem.predicate = predicate;
  problem.context = &call;
  problem.stopped = stopped;
}

void read_problem(Call& call, nb::handle q, nb::handle k, nb::handle out, Type type, Type out_type,
                  const nb::tuple& scoring) {
  read_queries(call, q, out, type, out_type);
  Problem& problem = call.problem;
  const Buffer& key = call.open(k);
  problem.key_heads = key.size(-3);
  problem.keys = key.size(-2);
  problem.key = key.tensor(type, problem.leading_axes);
  read_scoring(call, scoring);
}

}  // namespace softlookup
