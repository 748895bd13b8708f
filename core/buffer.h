// Arrays of Python as the core reads them: through the buffer protocol, so that read-only arrays and any strides pass
// without a copy.
#pragma once

#include <nanobind/nanobind.h>

#include "kernels.h"

namespace softlookup {

class Buffer {
 public:
  explicit Buffer(nanobind::handle array, int flags = PyBUF_STRIDES) {
    if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) throw nanobind::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  int axes() const { return view_.ndim; }
  template <class T>
  T* data() const {
    return static_cast<T*>(view_.buf);
  }

  // Axes are counted from the end, from -1 on. As NumPy broadcasts: one that is missing has size 1.
  int64_t size(int axis) const { return axis + view_.ndim < 0 ? 1 : view_.shape[axis + view_.ndim]; }

  Tensor tensor(Type type, int leading_axes) const {
    Tensor tensor;
    tensor.data = data<char>();
    tensor.type = type;
    tensor.column = step(-1);
    tensor.row = step(-2);
    tensor.head = step(-3);
    for (int axis = 0; axis < leading_axes; ++axis) tensor.leading[axis] = step(axis - leading_axes - 3);
    return tensor;
  }

 private:
  int64_t step(int axis) const { return size(axis) == 1 ? 0 : view_.strides[axis + view_.ndim]; }

  Py_buffer view_;
};

}  // namespace softlookup
