// The limit loops of one instruction set: compiled once for each, as isa.cpp is, and under the same rules. Every loop
// is written so that the compiler can neither drop nor shorten it: what it starts from passes through `hold`, which
// hides the value, and where it ends is checked.
#include "limits.h"

#include "amx.h"
#include "elementary.h"
#include "integers.h"

namespace softlookup {
namespace SOFTLOOKUP_ISA {
namespace {

// From here on the compiler knows nothing of the value but that it stands in a register.
template <class V>
inline void hold(V& value) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(value));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(value));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(value));
#endif
}

template <class V>
inline bool any_lane(V mask) {
  bool any = false;
  for (unsigned lane = 0; lane < sizeof(V) / sizeof(mask[0]); ++lane) any |= mask[lane] != 0;
  return any;
}

// ---- peaks: chains of multiply-adds ----

template <class T>
struct MultiplyAdd {
  using Lane = T;
  static constexpr int operations = 2;  // of one lane
  static constexpr double gain = 0.5;
  static Vector<T> left() { return splat(T{1}); }
  static Vector<T> right() { return splat(static_cast<T>(0.5)); }
  static Vector<T> apply(Vector<T> sum, Vector<T> left, Vector<T> right) {
#if defined(__x86_64__) && !defined(__AVX2__)
    return fma(sum, left, right);  // no fma here: a product of what stays the same would be taken out of the loop
#else
    return fma(left, right, sum);
#endif
  }
};

#if SOFTLOOKUP_BFLOAT16_DOT
struct DotBfloat16 {
  using Lane = float;
  static constexpr int operations = 4;
  static constexpr double gain = 1.0;
  static Vector<uint32_t> left() { return splat(0x3f803f80u); }   // 1, 1
  static Vector<uint32_t> right() { return splat(0x3f003f00u); }  // 1/2, 1/2
  static Vector<float> apply(Vector<float> sum, Vector<uint32_t> left, Vector<uint32_t> right) {
    return dot_bfloat16(left, right, sum);
  }
};
#endif

#if defined(__AVX512VNNI__)
struct DotInt8 {
  using Lane = int32_t;
  static constexpr int operations = 8;
  static constexpr double gain = 4.0;
  static Vector<int32_t> left() { return splat(0x01010101); }
  static Vector<int32_t> right() { return splat(0x01010101); }
  static Vector<int32_t> apply(Vector<int32_t> sum, Vector<int32_t> left, Vector<int32_t> right) {
    return (Vector<int32_t>)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)left, (__m512i)right);
  }
};

struct DotInt16 {
  using Lane = int32_t;
  static constexpr int operations = 4;
  static constexpr double gain = 2.0;
  static Vector<int32_t> left() { return splat(0x00010001); }
  static Vector<int32_t> right() { return splat(0x00010001); }
  static Vector<int32_t> apply(Vector<int32_t> sum, Vector<int32_t> left, Vector<int32_t> right) {
    return dot_int16((Vector<uint32_t>)left, (Vector<uint32_t>)right, sum);
  }
};
#endif

template <class Step, int chains>
bool multiply_and_add(int64_t rounds) {
  using Lane = typename Step::Lane;
  static_assert(chains + 2 <= registers, "the chains would spill");
  auto left = Step::left();
  auto right = Step::right();
  hold(left);
  hold(right);
  Vector<Lane> sums[chains];
#pragma GCC unroll 32
  for (int chain = 0; chain < chains; ++chain) {
    sums[chain] = splat(static_cast<Lane>(chain));
    hold(sums[chain]);
  }
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int chain = 0; chain < chains; ++chain) sums[chain] = Step::apply(sums[chain], left, right);
  }
  const Lane gain = static_cast<Lane>(Step::gain * static_cast<double>(rounds));
  auto wrong = sums[0] != splat(gain);
#pragma GCC unroll 32
  for (int chain = 1; chain < chains; ++chain) wrong |= sums[chain] != splat(static_cast<Lane>(chain + gain));
  return !any_lane(wrong);
}

#if SOFTLOOKUP_MATRIX_TILES
constexpr int64_t tile_operations = 2 * tile_side * tile_side * 2 * tile_side;  // two products a unit

// One product into each of tiles 0 .. chains - 1.
template <int chains>
inline void multiply_into_all() {
  if constexpr (chains > 1) multiply_into_all<chains - 1>();
  multiply_tiles<chains - 1, 6, 7>();
}
template <int chains>
inline bool every_sum_is(float expected) {
  float sums[tile_side * tile_side];
  store_tile<chains - 1>(sums, tile_side * sizeof(float));
  bool as_expected = true;
  for (const float sum : sums) as_expected &= sum == expected;
  if constexpr (chains > 1) return every_sum_is<chains - 1>(expected) && as_expected;
  return as_expected;
}
template <int chains>
inline void clear_all() {
  if constexpr (chains > 1) clear_all<chains - 1>();
  clear_tile<chains - 1>();
}

template <int chains>
bool multiply_in_tiles(int64_t rounds) {
  static_assert(chains <= 6, "tiles 6 and 7 hold the factors");
  uint32_t left[tile_side * tile_side];
  uint32_t right[tile_side * tile_side];
  for (uint32_t& pair : left) pair = 0x3f803f80u;   // 1, 1
  for (uint32_t& pair : right) pair = 0x3f003f00u;  // 1/2, 1/2
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.rows[tile] = tile_side;
    shapes.row_bytes[tile] = tile_side * sizeof(uint32_t);
  }
  load_shapes(shapes);
  clear_all<chains>();
  load_tile<6>(left, tile_side * sizeof(uint32_t));
  load_tile<7>(right, tile_side * sizeof(uint32_t));
  for (int64_t round = 0; round < rounds; ++round) multiply_into_all<chains>();
  const bool as_expected = every_sum_is<chains>(static_cast<float>(rounds * tile_side));
  release_tiles();
  return as_expected;
}
#endif

// ---- the exponential that the softmax uses ----

template <class T, int vectors>
bool exponentials(int64_t rounds) {
  constexpr T ln2 = static_cast<T>(0.69314718055994530942);
  Vector<T> logs[vectors];
  Vector<T> values[vectors];
#pragma GCC unroll 8
  for (int i = 0; i < vectors; ++i) {
    logs[i] = splat(static_cast<T>(-(i + 1)) * ln2);
    values[i] = Vector<T>{};
  }
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < vectors; ++i) {
      hold(logs[i]);
      values[i] = exp_nonpositive<T>(logs[i]);
      hold(values[i]);
    }
  }
  Vector<Integer<T>> wrong{};
#pragma GCC unroll 8
  for (int i = 0; i < vectors; ++i) {
    const Vector<T> ratio = values[i] * splat(static_cast<T>(2 << i));
    wrong |= (ratio < splat(static_cast<T>(0.99999))) | (ratio > splat(static_cast<T>(1.00001)));
  }
  return rounds == 0 || !any_lane(wrong);
}

// ---- the clock: additions that wait for each other, one cycle each on every CPU ----

template <int additions>
bool wait_for_each(int64_t rounds) {
  uint64_t sum = 1;
  uint64_t step = 3;
  asm volatile("" : "+r"(sum), "+r"(step));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 64
    for (int i = 0; i < additions; ++i) {
      sum += step;  // from a register: adding a constant is free on some CPUs
      asm volatile("" : "+r"(sum), "+r"(step));
    }
  }
  return sum == 1 + 3 * additions * static_cast<uint64_t>(rounds);
}

// ---- memory: one stream alone would wait at every page's end, where a CPU stops to fetch ahead ----

constexpr int streams = 4;

template <int vectors>
uint32_t add_up(const uint32_t* data, int64_t count) {
  constexpr int64_t step = vectors * lanes<uint32_t>;
  const int64_t part = count / (streams * step) * step;
  Vector<uint32_t> sums[vectors] = {};
  for (int64_t i = 0; i < part; i += step) {
#pragma GCC unroll 4
    for (int stream = 0; stream < streams; ++stream) {
#pragma GCC unroll 8
      for (int j = 0; j < vectors; ++j) sums[j] += load(data + stream * part + i + j * lanes<uint32_t>);
    }
  }
#pragma GCC unroll 8
  for (int j = 1; j < vectors; ++j) sums[0] += sums[j];
  uint32_t sum = sum_of<uint32_t>(sums[0]);
  for (int64_t i = streams * part; i < count; ++i) sum += data[i];
  return sum;
}

// ---- the table ----

constexpr bool many_registers = registers >= 32;
// Two units whose results come after 4 cycles need 8 chains; where a product and a sum are two instructions, 12.
constexpr int few_sums = many_registers ? 16 : 12;
constexpr int many_sums = many_registers ? 24 : 14;
constexpr int few_dots = 24;
constexpr int many_dots = 28;
// The polynomial's constants take ten registers.
constexpr int few_exponentials = many_registers ? 2 : 1;
constexpr int many_exponentials = many_registers ? 4 : 2;

template <class Step, int chains>
constexpr LimitLoop peak(const char* kind) {
  return {kind, chains, int64_t{chains} * Step::operations * lanes<typename Step::Lane>,
          multiply_and_add<Step, chains>};
}
template <class T, int vectors>
constexpr LimitLoop exponential(const char* kind) {
  return {kind, vectors, int64_t{vectors} * lanes<T>, exponentials<T, vectors>};
}

constexpr LimitLoop loops[] = {
    {"clock", 32, 32, wait_for_each<32>},
    {"clock", 64, 64, wait_for_each<64>},
    peak<MultiplyAdd<float>, few_sums>("fma_float32"),
    peak<MultiplyAdd<float>, many_sums>("fma_float32"),
    peak<MultiplyAdd<double>, few_sums>("fma_float64"),
    peak<MultiplyAdd<double>, many_sums>("fma_float64"),
    exponential<float, few_exponentials>("exp_float32"),
    exponential<float, many_exponentials>("exp_float32"),
    exponential<double, few_exponentials>("exp_float64"),
    exponential<double, many_exponentials>("exp_float64"),
#if SOFTLOOKUP_BFLOAT16_DOT
    peak<DotBfloat16, few_dots>("dot_bfloat16"),
    peak<DotBfloat16, many_dots>("dot_bfloat16"),
#endif
#if defined(__AVX512VNNI__)
    peak<DotInt8, few_dots>("dot_int8"),
    peak<DotInt8, many_dots>("dot_int8"),
    peak<DotInt16, few_dots>("dot_int16"),
    peak<DotInt16, many_dots>("dot_int16"),
#endif
#if SOFTLOOKUP_MATRIX_TILES
    {"tile_bfloat16", 4, 4 * tile_operations, multiply_in_tiles<4>},
    {"tile_bfloat16", 6, 6 * tile_operations, multiply_in_tiles<6>},
#endif
};

#define SOFTLOOKUP_TEXT_OF(name) #name
#define SOFTLOOKUP_TEXT(name) SOFTLOOKUP_TEXT_OF(name)

}  // namespace

extern const Limits limits;
const Limits limits = {SOFTLOOKUP_TEXT(SOFTLOOKUP_ISA),
                       loops,
                       static_cast<int>(sizeof loops / sizeof loops[0]),
                       {{4, add_up<4>}, {8, add_up<8>}}};

}  // namespace SOFTLOOKUP_ISA
}  // namespace softlookup
