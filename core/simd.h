// The vector type and its primitives for the instruction set that this translation unit is compiled for. Compiler
// vector extensions carry the arithmetic; the few intrinsics of the project live here, in halves.h (half-precision
// types) and in amx.h (the matrix unit), and nowhere else.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
constexpr int strip_rows = 12;  // 12 rows x 2 vectors of accumulators, 2 operands, 1 broadcast: 27 of 32 registers
constexpr int panel_vectors = 2;
constexpr int registers = 32;
constexpr int pair_rows = 6;  // whose sums with two panels fit
#elif defined(__AVX2__)
constexpr int vector_bytes = 32;
constexpr int strip_rows = 6;
constexpr int panel_vectors = 2;
constexpr int registers = 16;
constexpr int pair_rows = 0;
#elif defined(__aarch64__)
constexpr int vector_bytes = 16;
constexpr int strip_rows = 6;
constexpr int panel_vectors = 4;
constexpr int registers = 32;
constexpr int pair_rows = 0;
#else
constexpr int vector_bytes = 16;
constexpr int strip_rows = 6;
constexpr int panel_vectors = 2;
constexpr int registers = 16;
constexpr int pair_rows = 0;
#endif
static_assert(strip_rows * panel_vectors + panel_vectors + 1 <= registers, "the accumulators would spill");
static_assert(pair_rows * 2 * panel_vectors + 2 * panel_vectors + 1 <= registers, "the accumulators would spill");

template <class T, int bytes = vector_bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
  // Pairs of bfloat16 are read as 32-bit units from wherever their array begins.
  typedef T unaligned __attribute__((vector_size(bytes), aligned(1), may_alias));
};
template <class T>
using Vector = typename VectorOf<T>::type;
template <class T>
constexpr int lanes = vector_bytes / static_cast<int>(sizeof(T));

// The integer of the same width as a floating-point lane.
template <class T>
struct IntegerOf;
template <>
struct IntegerOf<float> {
  using type = int32_t;
};
template <>
struct IntegerOf<double> {
  using type = int64_t;
};
template <class T>
using Integer = typename IntegerOf<T>::type;

template <class T>
inline Vector<T> load(const T* source) {
  return *reinterpret_cast<const typename VectorOf<T>::unaligned*>(source);
}

template <class T>
inline void store(T* target, Vector<T> value) {
  *reinterpret_cast<typename VectorOf<T>::unaligned*>(target) = value;
}

constexpr int line_bytes = 64;

// Asks for a cache line, into the second level: there are more lines on their way to it at a time than to the first.
inline void prefetch_near(const void* address) { __builtin_prefetch(address, 0, 2); }

// Value minus zero is the value, -0 and NaN included, and compiles to one broadcast.
template <class T>
inline Vector<T> splat(T value) {
  return value - Vector<T>{};
}

// 0, 1, 2, ... in the lanes.
template <class T>
inline Vector<T> ramp() {
  Vector<T> result;
  for (int lane = 0; lane < lanes<T>; ++lane) result[lane] = static_cast<T>(lane);
  return result;
}

// Intrinsics in their masked form: GCC 12 warns of undefined lanes inside the plain ones.
// One rounding where the instruction set has fused multiply-add; the baseline x86-64 set has none and rounds twice.
#if defined(__AVX512F__)
inline Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) { return _mm512_fmadd_pd(a, b, c); }
inline Vector<float> maximum(Vector<float> a, Vector<float> b) { return _mm512_maskz_max_ps(0xffff, a, b); }
inline Vector<double> maximum(Vector<double> a, Vector<double> b) { return _mm512_maskz_max_pd(0xff, a, b); }
#elif defined(__AVX2__)
inline Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) { return _mm256_fmadd_pd(a, b, c); }
inline Vector<float> maximum(Vector<float> a, Vector<float> b) { return _mm256_max_ps(a, b); }
inline Vector<double> maximum(Vector<double> a, Vector<double> b) { return _mm256_max_pd(a, b); }
#elif defined(__x86_64__)
template <class V>
inline V fma(V a, V b, V c) {
  return a * b + c;
}
inline Vector<float> maximum(Vector<float> a, Vector<float> b) { return _mm_max_ps(a, b); }
inline Vector<double> maximum(Vector<double> a, Vector<double> b) { return _mm_max_pd(a, b); }
#elif defined(__aarch64__)
inline Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) {
  return (Vector<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
inline Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) {
  return (Vector<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
template <class V>
inline V maximum(V a, V b) {
  return a > b ? a : b;  // as on x86: where either is NaN, the second
}
#endif

// ---- shuffles: interleaving two vectors, and halving one ----

template <int count>
struct Shuffle;
template <>
struct Shuffle<2> {
  template <class V>
  static V low(V a, V b) {
    return __builtin_shufflevector(a, b, 0, 2);
  }
  template <class V>
  static V high(V a, V b) {
    return __builtin_shufflevector(a, b, 1, 3);
  }
};
template <>
struct Shuffle<4> {
  template <class V>
  static V low(V a, V b) {
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
  }
  template <class V>
  static V high(V a, V b) {
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
  }
};
template <>
struct Shuffle<8> {
  template <class V>
  static V low(V a, V b) {
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  }
  template <class V>
  static V high(V a, V b) {
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  }
};
template <>
struct Shuffle<16> {
  template <class V>
  static V low(V a, V b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  }
  template <class V>
  static V high(V a, V b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
};

// The same within every 16 bytes of two vectors, of 32-bit and of 64-bit elements.
template <int count>
struct PieceShuffle;
template <>
struct PieceShuffle<2> : Shuffle<2> {};
template <>
struct PieceShuffle<4> {
  template <class V>
  static V low(V a, V b) {
    if constexpr (sizeof(a[0]) == 8) return __builtin_shufflevector(a, b, 0, 4, 2, 6);
    return Shuffle<4>::low(a, b);
  }
  template <class V>
  static V high(V a, V b) {
    if constexpr (sizeof(a[0]) == 8) return __builtin_shufflevector(a, b, 1, 5, 3, 7);
    return Shuffle<4>::high(a, b);
  }
};
template <>
struct PieceShuffle<8> {
  template <class V>
  static V low(V a, V b) {
    if constexpr (sizeof(a[0]) == 8) return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
  }
  template <class V>
  static V high(V a, V b) {
    if constexpr (sizeof(a[0]) == 8) return __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    return __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  }
};
template <>
struct PieceShuffle<16> {
  template <class V>
  static V low(V a, V b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  }
  template <class V>
  static V high(V a, V b) {
    return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
};

constexpr int piece_bytes = 16;
template <class T>
constexpr int piece_lanes = piece_bytes / static_cast<int>(sizeof(T));

// One vector of the 16 bytes at each of the sources that lie `step` places apart.
template <class T>
inline Vector<T> load_pieces(const char* const* sources, int step, int64_t offset) {
#if defined(__AVX512F__)
  const auto piece = [&](int i) { return _mm_loadu_ps(reinterpret_cast<const float*>(sources[i * step] + offset)); };
  __m512 joined = _mm512_maskz_broadcast_f32x4(0xffff, piece(0));
  joined = _mm512_mask_broadcast_f32x4(joined, 0x00f0, piece(1));
  joined = _mm512_mask_broadcast_f32x4(joined, 0x0f00, piece(2));
  return (Vector<T>)_mm512_mask_broadcast_f32x4(joined, 0xf000, piece(3));
#elif defined(__AVX2__)
  const auto piece = [&](int i) { return _mm_loadu_ps(reinterpret_cast<const float*>(sources[i * step] + offset)); };
  return (Vector<T>)_mm256_insertf128_ps(_mm256_castps128_ps256(piece(0)), piece(1), 1);
#else
  (void)step;
  return load(reinterpret_cast<const T*>(sources[0] + offset));
#endif
}

// Transposes lanes x lanes elements, `offset` bytes after each of the rows. Whoever gathers the rows' pieces of 16
// bytes has nothing left to exchange between such pieces: half the shuffles, which one port alone does, become loads.
template <class T>
inline void transpose(const char* const (&rows)[lanes<T>], int64_t offset, Vector<T> (&columns)[lanes<T>]) {
  using Wide = Vector<double>;
  constexpr int step = piece_lanes<T>;
#pragma GCC unroll 4
  for (int piece = 0; piece < lanes<T> / step; ++piece) {
    Vector<T> own[step];
#pragma GCC unroll 4
    for (int i = 0; i < step; ++i) own[i] = load_pieces<T>(rows + i, step, offset + piece * piece_bytes);
    Vector<T>* out = columns + piece * step;
    if constexpr (step == 2) {
      out[0] = PieceShuffle<lanes<T>>::low(own[0], own[1]);
      out[1] = PieceShuffle<lanes<T>>::high(own[0], own[1]);
    } else {
      const auto low = [](Vector<T> a, Vector<T> b) { return PieceShuffle<lanes<T>>::low(a, b); };
      const auto high = [](Vector<T> a, Vector<T> b) { return PieceShuffle<lanes<T>>::high(a, b); };
      const Wide front[2] = {(Wide)low(own[0], own[1]), (Wide)low(own[2], own[3])};
      const Wide back[2] = {(Wide)high(own[0], own[1]), (Wide)high(own[2], own[3])};
      out[0] = (Vector<T>)PieceShuffle<lanes<double>>::low(front[0], front[1]);
      out[1] = (Vector<T>)PieceShuffle<lanes<double>>::high(front[0], front[1]);
      out[2] = (Vector<T>)PieceShuffle<lanes<double>>::low(back[0], back[1]);
      out[3] = (Vector<T>)PieceShuffle<lanes<double>>::high(back[0], back[1]);
    }
  }
}

struct Add {
  template <class V>
  static V apply(V a, V b) {
    return a + b;
  }
};
struct Larger {
  template <class V>
  static V apply(V a, V b) {
    return maximum(a, b);
  }
};

// Reduces the lanes by halving: the same tree for every caller, so that a sum's bits do not depend on who asks.
template <class Operation, class T, int bytes>
inline T reduce(typename VectorOf<T, bytes>::type value) {
  if constexpr (bytes == sizeof(T)) {
    return value[0];
  } else if constexpr (bytes == 2 * sizeof(T)) {
    const T low = value[0];
    const T high = value[1];
    return Operation::apply(low, high);
  } else {
    using Half = typename VectorOf<T, bytes / 2>::type;
    Half halves[2];
    std::memcpy(halves, &value, sizeof value);
    return reduce<Operation, T, bytes / 2>(Operation::apply(halves[0], halves[1]));
  }
}
// Reduces as many vectors as a vector has lanes at once, to result[i] for rows[i]: interleaving two vectors and
// combining the halves is one step of the tree above for both, so the bits are those of `reduce`.
template <class Operation, class T>
inline void reduce_rows(Vector<T> (&rows)[lanes<T>], T (&result)[lanes<T>]) {
  constexpr int count = lanes<T>;
#pragma GCC unroll 4
  for (int left = count / 2; left >= 1; left /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < left; ++i) {
      rows[i] =
          Operation::apply(Shuffle<count>::low(rows[i], rows[i + left]), Shuffle<count>::high(rows[i], rows[i + left]));
    }
  }
  std::memcpy(result, &rows[0], sizeof rows[0]);
}

template <class T>
inline T sum_of(Vector<T> value) {
  return reduce<Add, T, vector_bytes>(value);
}

// Keeps the lanes whose bit is set, replaces the others.
template <class T>
inline Vector<T> select(uint32_t bits, Vector<T> value, Vector<T> otherwise) {
  using Lane = Integer<T>;
  Vector<Lane> bit;
  for (int lane = 0; lane < lanes<T>; ++lane) bit[lane] = Lane{1} << lane;
  return (splat(static_cast<Lane>(bits)) & bit) != 0 ? value : otherwise;
}

// One bit for each lane that a comparison holds in.
template <class T>
inline uint32_t lanes_where(Vector<Integer<T>> comparison) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_movepi32_mask((__m512i)comparison);
  return _mm512_movepi64_mask((__m512i)comparison);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return static_cast<uint32_t>(_mm256_movemask_ps((__m256)comparison));
  return static_cast<uint32_t>(_mm256_movemask_pd((__m256d)comparison));
#elif defined(__x86_64__)
  if constexpr (sizeof(T) == 4) return static_cast<uint32_t>(_mm_movemask_ps((__m128)comparison));
  return static_cast<uint32_t>(_mm_movemask_pd((__m128d)comparison));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < lanes<T>; ++lane) bits |= static_cast<uint32_t>(comparison[lane] != 0) << lane;
  return bits;
#endif
}

// Whether subnormal numbers count as zero on this thread.
#if defined(__x86_64__)
inline uint64_t subnormal_mode() { return _mm_getcsr(); }
inline void set_subnormal_mode(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
constexpr uint64_t subnormals_are_zero = 0x8040u;
#elif defined(__aarch64__)
inline uint64_t subnormal_mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_subnormal_mode(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
constexpr uint64_t subnormals_are_zero = uint64_t{1} << 24;
#endif

// Keeps a mode for as long as it lives; the mode before comes back afterwards.
class SubnormalMode {
 public:
  explicit SubnormalMode(uint64_t mode) : saved_(subnormal_mode()) { set_subnormal_mode(mode); }
  ~SubnormalMode() { set_subnormal_mode(saved_); }
  SubnormalMode(const SubnormalMode&) = delete;
  SubnormalMode& operator=(const SubnormalMode&) = delete;

 private:
  uint64_t saved_;
};

// Subnormals cost a hundred cycles each and would make the speed depend on the data: they are zero inside a work item.
struct SubnormalsAreZero : SubnormalMode {
  SubnormalsAreZero() : SubnormalMode(subnormal_mode() | subnormals_are_zero) {}
};
struct SubnormalsAreNumbers : SubnormalMode {
  SubnormalsAreNumbers() : SubnormalMode(subnormal_mode() & ~subnormals_are_zero) {}
};

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
