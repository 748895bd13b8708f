// Products in the tiles of the matrix unit (AMX). Its instructions have a file of their own because they are no
// vectors: eight registers of 16 rows of 64 bytes that must be given shapes before use, live outside what a compiler
// knows of, and are released so that the system need not save them.
#pragma once

#include "storage.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

// What an arithmetic keeps in the CPU from one product to the next, and gives up before other code runs: nothing.
template <class P>
struct Products {
  static void pause() {}
};

// Packs rows first .. first + count as they lie, [count][units of columns], for products that read whole rows.
template <class P>
void pack_query_rows(const Matrix& matrix, int64_t first, int count, typename P::Unit* target) {
  const int64_t units = units_of<P>(matrix.columns);
  const auto row_bytes = static_cast<size_t>(matrix.columns * size_of(matrix.type));
  std::memset(target, 0, static_cast<size_t>(count * units) * sizeof *target);
  for (int row = 0; row < count; ++row, target += units) {
    char* copy = reinterpret_cast<char*>(target);
    const char* source = contiguous_row(matrix, first + row, copy);
    if (source != copy) std::memcpy(copy, source, row_bytes);
  }
}

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define SOFTLOOKUP_MATRIX_TILES 1

// The same units, multiplied in tiles of the matrix unit: two tiles of rows make a strip.
struct TiledBfloat16 : PairedBfloat16 {
  static constexpr bool weights_over_scores = true;
  static constexpr int units_together = 16;
  static constexpr bool whole_blocks = true;
  static constexpr bool query_rows = true;
  static constexpr int strip_rows = 32;
  static constexpr int stack_strips = 4;

  // A power of two, which most scales are, changes no bit of a product unless it is subnormal.
  static bool scale_queries(Unit* units, int64_t count, float scale) {
    const bool exact = (bits_of_float(scale) & 0x7fffffu) == 0 && scale >= 0x1p-16f && scale <= 1;
    if (!exact || scale == 1) return exact;
    const Vector<uint32_t> upper = splat(0xffff0000u);
    for (int64_t i = 0; i < count; i += lanes<Unit>) {
      const Vector<uint32_t> pairs = load(units + i);
      const auto even = (Vector<uint32_t>)((Vector<float>)(pairs << 16) * splat(scale));
      const auto odd = (Vector<uint32_t>)((Vector<float>)(pairs & upper) * splat(scale));
      store(units + i, (even >> 16) | (odd & upper));
    }
    return true;
  }
};

constexpr int tile_side = 16;  // rows of a tile, and 32-bit units of its rows

// What LDTILECFG reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Written out because the compilers' own functions do not say that a tile is read from memory.
inline void load_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
inline void release_tiles() { asm volatile("tilerelease"); }
template <int tile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}
template <int tile>
inline void load_tile(const void* source, int64_t step_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(source), "r"(step_bytes), "i"(tile) : "memory");
}
template <int tile>
inline void store_tile(void* target, int64_t step_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(target), "r"(step_bytes), "i"(tile) : "memory");
}
// sums += rows times columns, of pairs of bfloat16.
template <int sums, int rows, int columns>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(columns));
}

// The products of a strip: sums of its upper 16 rows in tiles 0 and 1, of the others in 2 and 3. A tile has as many
// rows as there are, so that nothing is read or written below the strip.
template <>
struct Products<TiledBfloat16> {
  using P = TiledBfloat16;
  using T = P::Number;
  using Unit = P::Unit;
  static_assert(P::whole_blocks && panel_lanes<P> == 2 * tile_side && P::strip_rows == 2 * tile_side &&
                P::units_together == tile_side);

  Products() = default;
  ~Products() { pause(); }
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  // Scores of one panel of keys.
  void score(const Unit* queries, const Unit* keys, int64_t units, int rows, T scale, T* scores) {
    clear(rows);
    add(queries, units, keys, units);
    store_sums(scores, tile_keys);
    if (scale == 1) return;
    for (int row = 0; row < rows; ++row, scores += tile_keys) {
#pragma GCC unroll 4
      for (int v = 0; v < panel_vectors; ++v) store(scores + v * lanes<T>, load(scores + v * lanes<T>) * splat(scale));
    }
  }

  void clear(int rows) {
    shape(rows);
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
  }
  // sums += rows of `a`, `a_step` units apart, times a panel.
  void add(const Unit* a, int64_t a_step, const Unit* panel, int64_t units) const {
    if (height_ > tile_side) {
      add<true>(a, a_step, panel, units);
    } else {
      add<false>(a, a_step, panel, units);
    }
  }
  void store_sums(T* target, int64_t step) const {
    const auto bytes = step * static_cast<int64_t>(sizeof(T));
    store_tile<0>(target, bytes);
    store_tile<1>(target + tile_side, bytes);
    if (height_ <= tile_side) return;
    store_tile<2>(target + tile_side * step, bytes);
    store_tile<3>(target + tile_side * step + tile_side, bytes);
  }

  // Other code may give the tiles other shapes.
  void pause() {
    if (height_ != 0) release_tiles();
    height_ = 0;
  }

 private:
  void shape(int rows) {
    if (rows == height_) return;
    TileShapes shapes;
    const auto upper = static_cast<uint8_t>(rows < tile_side ? rows : tile_side);
    const auto lower = static_cast<uint8_t>(rows > tile_side ? rows - tile_side : tile_side);
    const uint8_t heights[8] = {upper, upper, lower, lower, upper, lower, tile_side, tile_side};
    for (int tile = 0; tile < 8; ++tile) {
      shapes.rows[tile] = heights[tile];
      shapes.row_bytes[tile] = tile_side * sizeof(Unit);
    }
    load_shapes(shapes);
    height_ = rows;
  }

  template <bool both>
  static void add(const Unit* a, int64_t a_step, const Unit* panel, int64_t units) {
    const auto a_bytes = a_step * static_cast<int64_t>(sizeof(Unit));
    constexpr int64_t panel_bytes = panel_lanes<P> * sizeof(Unit);
    for (int64_t unit = 0; unit < units; unit += tile_side, a += tile_side, panel += tile_side * panel_lanes<P>) {
      load_tile<4>(a, a_bytes);
      load_tile<6>(panel, panel_bytes);
      multiply_tiles<0, 4, 6>();
      load_tile<7>(panel + tile_side, panel_bytes);
      multiply_tiles<1, 4, 7>();
      if constexpr (both) {
        load_tile<5>(a + tile_side * a_step, a_bytes);
        multiply_tiles<2, 5, 6>();
        multiply_tiles<3, 5, 7>();
      }
    }
  }

  int height_ = 0;  // of the strip that the tiles are shaped for; 0: none
};

#else
#define SOFTLOOKUP_MATRIX_TILES 0
#endif

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
