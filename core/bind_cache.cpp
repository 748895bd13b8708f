// The caches of softlookup._core: rows into pages and out of them, and attention over pages. Python owns the pages and
// the tables that say where they lie.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "call.h"
#include "driver.h"
#include "pages.h"
#include "parallel.h"

namespace softlookup {
namespace {

// `PageShape` of softlookup._pages: type, d_k, d_v, whether pages hold rows.
PageFormat read_format(const Kernels& kernels, const nb::tuple& shape) {
  const auto type = static_cast<Type>(nb::cast<int>(shape[0]));
  return {type, kernels.cached[static_cast<int>(type)].layout, nb::cast<int64_t>(shape[1]), nb::cast<int64_t>(shape[2]),
          nb::cast<bool>(shape[3])};
}

int64_t head_bytes(const nb::tuple& shape, nb::handle isa) { return read_format(kernels_of(isa), shape).head_bytes; }

// Addresses of pages, int64 [batch, blocks].
struct Table {
  const Buffer& buffer;

  int64_t batch() const { return buffer.size(-2); }
  int64_t blocks() const { return buffer.size(-1); }
  char* const* pages() const { return buffer.data<char* const>(); }
  char* page_of(int64_t item, int64_t position) const { return pages()[item * blocks() + position / block_keys]; }
};

// Calls function(index) for each of `count` on the threads; an allocation that fails comes back as what it is.
template <class Function>
void in_parallel(int64_t count, int threads, const Function& function) {
  const nb::gil_scoped_release released;
  std::atomic<bool> failed{false};
  const auto body = [&](int64_t index) {
    try {
      function(index);
    } catch (const std::bad_alloc&) {
      failed.store(true);
    }
  };
  using Body = decltype(body);
  parallel_for(
      count, threads, [](void* context, int64_t index) { (*static_cast<Body*>(context))(index); },
      const_cast<void*>(static_cast<const void*>(&body)));
  if (failed.load()) throw std::bad_alloc();
}

// Float arrays [batch, heads, columns], or nothing.
struct ColumnArrays {
  const Buffer* means = nullptr;
  const Buffer* factors = nullptr;

  Columns of(int64_t row) const { return {numbers(means, row), numbers(factors, row)}; }
  static const float* numbers(const Buffer* buffer, int64_t row) {
    return buffer ? buffer->data<const float>() + row * buffer->size(-1) : nullptr;
  }
};
ColumnArrays read_columns(Call& call, nb::handle means, nb::handle factors) {
  return {means.is_none() ? nullptr : &call.open(means), factors.is_none() ? nullptr : &call.open(factors)};
}

// What is appended: rows of one array and the type of their numbers.
struct Source {
  Tensor tensor;
  int64_t width = 0;
  int64_t groups = 1;  // of columns that share a scale
  ColumnArrays columns;

  const char* row(int64_t item, int64_t head, int64_t token) const {
    return tensor.data + item * tensor.leading[0] + head * tensor.head + token * tensor.row;
  }
};

// Codes and scales of new tokens, made before any is stored. [batch, heads, tokens, columns] and [batch, heads,
// tokens, groups].
struct Codes {
  std::vector<int8_t> codes;
  std::vector<float> scales;
};

class Appending {
 public:
  Appending(Call& call, const PageFormat& format, nb::handle table, nb::handle starts, nb::handle counts, nb::handle k,
            nb::handle v, Type type)
      : format_(format),
        table_{call.open(table)},
        starts_(call.open(starts).data<const int64_t>()),
        counts_(call.open(counts).data<const int64_t>()) {
    const Buffer& keys = call.open(k);
    heads_ = keys.size(-3);
    tokens_ = keys.size(-2);
    sources_[0] = {keys.tensor(type, 1), keys.size(-1), format.key_groups, {}};
    if (v.is_none()) return;
    const Buffer& values = call.open(v);
    sources_[1] = {values.tensor(type, 1), values.size(-1), 1, {}};
  }

  void set_columns(int source, const ColumnArrays& columns) { sources_[source].columns = columns; }
  int64_t items() const { return table_.batch() * heads_; }

  void make_room() {
    for (int i = 0; i < 2; ++i) {
      codes_[i].codes.resize(static_cast<size_t>(items() * tokens_ * sources_[i].width));
      codes_[i].scales.resize(static_cast<size_t>(items() * tokens_ * sources_[i].groups));
    }
  }

  // False where a number is not finite.
  bool code(int64_t item) {
    std::vector<float> numbers(static_cast<size_t>(std::max(sources_[0].width, sources_[1].width)));
    std::vector<float> rest;
    for (int i = 0; i < 2; ++i) {
      const Source& source = sources_[i];
      if (!source.tensor.data) continue;
      const Columns columns = source.columns.of(item);
      const Coding coding = {format_.type, i == 0 ? format_.key_group : source.width, i == 0 && !format_.rows};
      for (int64_t token = 0; token < counts_[item / heads_]; ++token) {
        read_floats(source.tensor.type, source.row(item / heads_, item % heads_, token), source.tensor.column,
                    source.width, numbers.data());
        const int64_t place = item * tokens_ + token;
        if (!make_codes(coding, numbers.data(), source.width, columns, rest,
                        codes_[i].codes.data() + place * source.width,
                        codes_[i].scales.data() + place * source.groups)) {
          return false;
        }
      }
    }
    return true;
  }

  void store(int64_t item) {
    const int64_t batch = item / heads_;
    const int64_t head = item % heads_;
    std::vector<char> copies[2];
    for (int64_t token = 0; token < counts_[batch];) {
      const int64_t position = starts_[batch] + token;
      PageHead page(format_, table_.page_of(batch, position) + head * format_.head_bytes);
      for (int64_t slot = position % block_keys; slot < block_keys && token < counts_[batch]; ++slot, ++token) {
        page.write(slot, slot_of(item, token, copies));
      }
    }
  }

 private:
  Slot slot_of(int64_t item, int64_t token, std::vector<char> (&copies)[2]) {
    if (!is_coded(format_.type)) {
      return {row_of(0, item, token, copies), row_of(1, item, token, copies), nullptr, nullptr};
    }
    const int64_t place = item * tokens_ + token;
    const auto codes_of = [&](int i) {
      return reinterpret_cast<char*>(codes_[i].codes.data() + place * sources_[i].width);
    };
    return {codes_of(0), codes_of(1), codes_[0].scales.data() + place * sources_[0].groups,
            codes_[1].scales.data() + place};
  }

  // A row's elements, copied where they do not touch.
  char* row_of(int i, int64_t item, int64_t token, std::vector<char> (&copies)[2]) const {
    const Source& source = sources_[i];
    if (!source.tensor.data) return nullptr;
    const char* row = source.row(item / heads_, item % heads_, token);
    const int64_t size = size_of(format_.type);
    if (source.tensor.column == size || source.width == 1) return const_cast<char*>(row);
    copies[i].resize(static_cast<size_t>(source.width * size));
    for (int64_t c = 0; c < source.width; ++c) {
      std::memcpy(copies[i].data() + c * size, row + c * source.tensor.column, static_cast<size_t>(size));
    }
    return copies[i].data();
  }

  const PageFormat& format_;
  Table table_;
  const int64_t* starts_;
  const int64_t* counts_;
  int64_t heads_ = 0;
  int64_t tokens_ = 0;
  Source sources_[2];  // keys and values
  Codes codes_[2];
};

// Appends the first `counts[b]` tokens of every batch item from position `starts[b]` on, where pages stand ready.
// False, and nothing is written, where codes were to be made of what is not finite.
bool append(const nb::tuple& shape, nb::handle table, nb::handle starts, nb::handle counts, nb::handle k, nb::handle v,
            int type, nb::handle key_means, nb::handle key_factors, nb::handle value_means, nb::handle value_factors,
            int threads, nb::handle isa) {
  Call call;
  const PageFormat format = read_format(kernels_of(isa), shape);
  Appending appending(call, format, table, starts, counts, k, v, static_cast<Type>(type));
  if (is_coded(format.type)) {
    appending.set_columns(0, read_columns(call, key_means, key_factors));
    appending.set_columns(1, read_columns(call, value_means, value_factors));
    appending.make_room();
    std::atomic<bool> finite{true};
    in_parallel(appending.items(), threads, [&](int64_t item) {
      if (!appending.code(item)) finite.store(false);
    });
    if (!finite.load()) return false;
  }
  in_parallel(appending.items(), threads, [&](int64_t item) { appending.store(item); });
  return true;
}

// Moves the slots of one batch item between its pages and arrays of elements [heads, tokens, columns] and of scales
// [heads, tokens, groups] and [heads, tokens]: out of the pages, or into them. Tokens begin at position `first`.
void move_rows(const nb::tuple& shape, nb::handle table, int64_t batch, int64_t first, nb::handle keys,
               nb::handle values, nb::handle key_scales, nb::handle value_scales, bool into_pages, int threads,
               nb::handle isa) {
  Call call;
  const PageFormat format = read_format(kernels_of(isa), shape);
  const Table pages{call.open(table)};
  const int flags = into_pages ? PyBUF_STRIDES : PyBUF_STRIDES | PyBUF_WRITABLE;
  const auto data = [&](nb::handle array) { return array.is_none() ? nullptr : call.open(array, flags).data<char>(); };
  const Buffer& key_buffer = call.open(keys, flags);
  char* arrays[4] = {key_buffer.data<char>(), data(values), data(key_scales), data(value_scales)};
  const int64_t heads = key_buffer.size(-3);
  const int64_t tokens = key_buffer.size(-2);
  const int64_t size = element_bytes(format.type);
  in_parallel(heads, threads, [&](int64_t head) {
    for (int64_t token = 0; token < tokens; ++token) {
      const int64_t place = head * tokens + token;
      const auto scales_of = [&](int array, int64_t groups) {
        return arrays[array] ? reinterpret_cast<float*>(arrays[array]) + place * groups : nullptr;
      };
      Slot slot = {arrays[0] + place * format.width * size,
                   arrays[1] ? arrays[1] + place * format.value_width * size : nullptr, scales_of(2, format.key_groups),
                   scales_of(3, 1)};
      PageHead page(format, pages.page_of(batch, first + token) + head * format.head_bytes);
      const int64_t index = (first + token) % block_keys;
      if (into_pages) {
        page.write(index, slot);
      } else {
        page.read(index, slot);
      }
    }
  });
}

// Rotates float32 [..., columns], contiguous, in place; a few rows at a time on each thread.
void rotate(nb::handle numbers, int64_t block, int threads) {
  constexpr int64_t together = 4096;
  Call call;
  const Buffer& buffer = call.open(numbers, PyBUF_STRIDES | PyBUF_WRITABLE);
  const int64_t blocks = buffer.size(-2) * buffer.size(-1) / block;
  const int64_t share = std::max(together / block, int64_t{1});
  in_parallel((blocks + share - 1) / share, threads, [&](int64_t index) {
    const int64_t first = index * share;
    rotate_blocks(buffer.data<float>() + first * block, std::min(share, blocks - first), block);
  });
}

const float* floats(Call& call, nb::handle array, int64_t& columns) {
  if (array.is_none()) return nullptr;
  const Buffer& buffer = call.open(array);
  columns = buffer.size(-1);
  return buffer.data<const float>();
}

void attend_cache(nb::handle q, nb::handle out, int type, int out_type, const nb::tuple& scoring, nb::handle moments,
                  const nb::tuple& shape, nb::handle table, int64_t key_heads, int64_t keys, nb::handle key_means,
                  nb::handle key_factors, nb::handle value_means, nb::handle value_factors, int threads,
                  nb::handle isa) {
  Call call;
  const Kernels& kernels = kernels_of(isa);
  const PageFormat format = read_format(kernels, shape);
  const Table addresses{call.open(table)};
  read_queries(call, q, out, static_cast<Type>(type), static_cast<Type>(out_type));
  Problem& problem = call.problem;
  problem.key_heads = key_heads;
  problem.keys = keys;
  problem.value_width = format.value_width;
  problem.pages = {addresses.pages(), addresses.blocks(),  format.type,       format.rows,
                   format.row_bytes,  format.head_bytes,   format.tile_bytes, format.values,
                   format.key_scales, format.value_scales, format.key_groups};
  problem.pages.key_means = floats(call, key_means, problem.pages.key_columns);
  problem.pages.key_factors = floats(call, key_factors, problem.pages.key_columns);
  problem.pages.value_means = floats(call, value_means, problem.pages.value_columns);
  problem.pages.value_factors = floats(call, value_factors, problem.pages.value_columns);
  read_scoring(call, scoring);
  if (!moments.is_none()) problem.moments = call.open(moments, PyBUF_STRIDES | PyBUF_WRITABLE).data<double>();
  // Rows of floats are packed as the arrays of a call are.
  const auto place = static_cast<int>(format.type);
  const Arithmetic& arithmetic =
      format.rows && !is_coded(format.type) ? *kernels.arithmetic[place] : *kernels.cached[place].arithmetic;
  run(call, [&](const Problem& asked) { attend(asked, arithmetic, threads); });
}

}  // namespace

void bind_cache(nb::module_& module) {
  using nb::literals::operator""_a;
  module.attr("PAGE_KEYS") = block_keys;
  module.attr("GROUP_COLUMNS") = group_columns;
  module.def("page_head_bytes", head_bytes, "shape"_a, "isa"_a.none());
  module.def("append", append, "shape"_a, "table"_a, "starts"_a, "counts"_a, "k"_a, "v"_a.none(), "type"_a,
             "key_means"_a.none(), "key_factors"_a.none(), "value_means"_a.none(), "value_factors"_a.none(),
             "threads"_a, "isa"_a.none());
  module.def("rotate", rotate, "numbers"_a, "block"_a, "threads"_a);
  module.def("move_rows", move_rows, "shape"_a, "table"_a, "batch"_a, "first"_a, "keys"_a, "values"_a.none(),
             "key_scales"_a.none(), "value_scales"_a.none(), "into_pages"_a, "threads"_a, "isa"_a.none());
  module.def("attend_cache", attend_cache, "q"_a, "out"_a, "type"_a, "out_type"_a, "scoring"_a, "moments"_a.none(),
             "shape"_a, "table"_a, "key_heads"_a, "keys"_a, "key_means"_a.none(), "key_factors"_a.none(),
             "value_means"_a.none(), "value_factors"_a.none(), "threads"_a, "isa"_a.none());
}

}  // namespace softlookup
