// Statistics and normalizers of rows, as Python calls them: every array is contiguous.
#include <optional>

#include "buffer.h"
#include "statistics.h"

namespace nb = nanobind;

namespace softlookup {
namespace {

// Moments [batch, heads, queries, moment_count], sinks and positions, open as long as this lives.
class Rows {
 public:
  Rows(nb::handle moments, nb::handle sinks) : moments_(moments) {
    rows_.moments = moments_.data<const double>();
    rows_.batch = moments_.size(-4);
    rows_.heads = moments_.size(-3);
    rows_.queries = moments_.size(-2);
    if (sinks.is_none()) return;
    sinks_.emplace(sinks);
    rows_.sinks = sinks_->data<const double>();
  }

  void place(nb::handle q_start, int64_t k_start) {
    rows_.key_start = k_start;
    rows_.query_start = &start_;
    if (PyLong_Check(q_start.ptr())) {
      start_ = nb::cast<int64_t>(q_start);
      return;
    }
    starts_.emplace(q_start);
    rows_.query_start = starts_->data<const int64_t>();
    rows_.query_start_step = starts_->size(-1) == 1 ? 0 : 1;
  }

  const MomentRows& rows() const { return rows_; }

 private:
  Buffer moments_;
  std::optional<Buffer> sinks_;
  std::optional<Buffer> starts_;
  int64_t start_ = 0;
  MomentRows rows_;
};

constexpr int writable = PyBUF_STRIDES | PyBUF_WRITABLE;

void statistics(nb::handle moments, nb::handle sinks, nb::handle q_start, int64_t k_start, nb::handle numbers, int type,
                nb::handle lse, nb::handle counts) {
  Rows rows(moments, sinks);
  rows.place(q_start, k_start);
  const Buffer made(numbers, writable);
  const Buffer logs(lse, writable);
  const Buffer visible_and_argmax(counts, writable);
  int64_t* visible = visible_and_argmax.data<int64_t>();
  const int64_t count = rows.rows().batch * rows.rows().heads * rows.rows().queries;
  const nb::gil_scoped_release released;
  make_statistics(rows.rows(),
                  {made.data<void>(), static_cast<Type>(type), logs.data<double>(), visible, visible + count});
}

void normalizers(nb::handle moments, nb::handle sinks, nb::handle lse, nb::handle top, nb::handle share) {
  const Rows rows(moments, sinks);
  const Buffer logs(lse, writable);
  const Buffer tops(top, writable);
  const Buffer shares(share, writable);
  const nb::gil_scoped_release released;
  make_normalizers(rows.rows(), logs.data<double>(), tops.data<double>(), shares.data<double>());
}

}  // namespace

void bind_statistics(nb::module_& module) {
  using nb::literals::operator""_a;
  module.def("statistics", statistics, "moments"_a, "sinks"_a.none(), "q_start"_a, "k_start"_a, "numbers"_a, "type"_a,
             "lse"_a, "counts"_a);
  module.def("normalizers", normalizers, "moments"_a, "sinks"_a.none(), "lse"_a, "top"_a, "share"_a);
}

}  // namespace softlookup
