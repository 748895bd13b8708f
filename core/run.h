// What one call of `attend` works with, and where the panels of keys and values come from that its products read: they
// are packed from the arrays of the call, block by block, or they lie ready in the pages of a cache.
#pragma once

#include "amx.h"
#include "codes.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

// Consecutive strips that share a pass over a tile.
template <class P>
struct Stack {
  int count;
  Strip strips[P::stack_strips];
  int64_t first_row;  // within the item
  int64_t rows;

  int64_t place(const Strip& strip) const { return strip.first_row - first_row; }
};

constexpr int lines_at_once = 12;  // of what is needed next, asked for before each strip's products

constexpr int64_t keys_ahead = 24;
constexpr int64_t page_ahead_bytes = 20480;  // measured: from 16 to 24 KiB on, two threads read fastest

template <class P>
struct Run {
  using T = typename P::Number;
  using Unit = typename P::Unit;
  using Stored = typename P::Stored;

  const Problem& problem;
  const Item& item;
  Carver carver;
  int64_t rows;
  Scratch<P> scratch;
  Matrix keys;  // what is packed; of a page of rows, those of the current block
  Matrix values;
  const char* page = nullptr;   // of the item's head, with the current block; null: no cache
  const char* next = nullptr;   // the same of the block after it; null: none
  const Stored* packed_keys;    // of the current block: [tiles][panels][units of d_k][panel_lanes]
  const Stored* packed_values;  // [tiles][panels of d_v][units of tile_keys][panel_lanes]
  int64_t key_step;             // from one tile to the next
  int64_t value_step;
  int64_t units;  // of d_k
  T scale;        // of the products of queries and keys, as they are packed
  int64_t strips;
  T* scores;  // of the current tile, as the three that follow
  Unit* weights;
  Bits* bits;
  Visible* visible;      // by the strips of the current stack
  bool values_in_place;  // values are read where they lie
  int64_t ahead =
      0;  // so far ahead of what is read from memory, in its own units, the next is asked for; 0: not at all
  Upcoming upcoming;  // keys and values of the next block
  int64_t block = 0;  // absolute index of the current block
  Products<P> products;
  Visible seen[tiles_at_once<P>][P::stack_strips] = {};
  uint64_t panels_done[block_tiles] = {};  // which of the block's panels are packed
  bool values_done[block_tiles] = {};

  Run(const Problem& problem_, const Item& item_, char* memory)
      : problem(problem_),
        item(item_),
        carver(memory),
        rows(item_.queries * (problem_.query_heads / problem_.key_heads)),
        scratch(problem_, rows, carver),
        keys(key_matrix(problem_, item_, problem_.key, problem_.width)),
        values(key_matrix(problem_, item_, problem_.value, problem_.value_width)),
        packed_keys(reinterpret_cast<const Stored*>(scratch.keys)),
        packed_values(reinterpret_cast<const Stored*>(scratch.values)),
        key_step(tile_keys * stored_units<P>(units_of<P>(problem_.width))),
        value_step(stored_units<P>(tile_units<P>) * padded_width<P>(problem_.value_width)),
        units(units_of<P>(problem_.width)),
        scale(static_cast<T>(problem_.scale)),
        strips(strips_of(rows, P::strip_rows)) {
    look_at(0);
    // A single strip reads each value once: a copy would only cost. The row stride must be a whole number of units.
    values_in_place = strips == 1 && !problem.pages.table && P::products == 1 && size_of(values.type) == sizeof(T) &&
                      values.column == sizeof(T) && values.row % static_cast<int64_t>(sizeof(T)) == 0 &&
                      values.columns % panel_lanes<P> == 0;
    if (values_in_place) ahead = keys_ahead * values.row / static_cast<int64_t>(sizeof(Stored));
    if (strips == 1 && problem.pages.table && !problem.pages.rows)
      ahead = page_ahead_bytes / static_cast<int64_t>(sizeof(Stored));
  }

  Strip strip(int64_t index) const { return strip_at(problem, item, rows, P::strip_rows, index); }
  Stack<P> stack(int64_t first) const {
    Stack<P> stack = {0, {}, strip(first).first_row, 0};
    for (int64_t index = first; index < smaller(first + P::stack_strips, strips); ++index) {
      stack.strips[stack.count++] = strip(index);
      stack.rows += stack.strips[stack.count - 1].rows;
    }
    return stack;
  }
  const Unit* queries_of(const Strip& strip) const { return scratch.queries + strip.first_row * units; }
  QueryCodes<P> codes_of(const Strip& strip) const {
    return {queries_of(strip),
            starts_of(strip),
            scratch.row_scale + strip.first_row,
            scratch.row_offset + strip.first_row,
            units,
            key_group()};
  }
  int32_t* starts_of(const Strip& strip) const {
    return scratch.row_start + strip.first_row * problem.pages.key_groups;
  }
  // Units of a key that share a scale.
  int64_t key_group() const { return problem.pages.key_groups == 1 ? units : group_columns / P::products; }

  // Makes a tile of the block the current one, where tiles have scores of their own.
  void look_at(int64_t tile) {
    const int64_t place = tiles_at_once<P> == 1 ? 0 : tile;
    scores = scratch.scores + place * stack_rows<P> * tile_keys;
    weights = scratch.weights + place * stack_rows<P> * weight_step<P>;
    bits = scratch.bits + place * stack_rows<P>;
    visible = seen[place];
  }

  // False where a cache has no such page.
  bool start_block(int64_t index) {
    block = index;
    for (int64_t tile = 0; tile < block_tiles; ++tile) {
      panels_done[tile] = 0;
      values_done[tile] = false;
    }
    const Pages& pages = problem.pages;
    if (!pages.table) return true;
    const char* whole = index < pages.blocks ? pages.table[item.batch * pages.blocks + index] : nullptr;
    if (!whole) return false;
    page = whole + item.key_head * pages.head_bytes;
    const char* after = index + 1 < pages.blocks ? pages.table[item.batch * pages.blocks + index + 1] : nullptr;
    next = after ? after + item.key_head * pages.head_bytes : nullptr;
    if (!pages.rows) {
      packed_keys = reinterpret_cast<const Stored*>(page);
      packed_values = reinterpret_cast<const Stored*>(page + pages.values);
      key_step = value_step = pages.tile_bytes / static_cast<int64_t>(sizeof(Stored));
    }
    return true;
  }
  // What is to be asked for while `place` is read, as a distance: behind a head's end in a page lies another head, so
  // there the next page goes on. Where there is none, what is read already.
  int64_t ahead_of(const void* place) const {
    if (!page) return ahead;
    const int64_t bytes = ahead * static_cast<int64_t>(sizeof(Stored));
    const char* from = static_cast<const char*>(place);
    const int64_t beyond = from + bytes - (page + problem.pages.head_bytes);
    if (beyond < 0) return ahead;
    return next ? (next + beyond - from) / static_cast<int64_t>(sizeof(Stored)) : 0;
  }
  // Of the tile's first key among the rows that are packed.
  int64_t row_of(const Tile& tile) const { return page ? tile.index * tile_keys : tile.first_key; }
  bool lies_packed() const { return page && !problem.pages.rows; }

  // Of the tile's keys, one for each in every group of columns, and of its values.
  const float* key_scale(const Tile& tile) const { return scales(problem.pages.key_scales, tile); }
  const float* value_scale(const Tile& tile) const { return scales(problem.pages.value_scales, tile); }
  // The products ask for what lies ahead of the codes; scales lie between those.
  void ask_for_scales(const Tile& tile) const {
    if (ahead == 0) return;
    ask_for_scales(key_scale(tile), problem.pages.key_groups * tile_keys);
    ask_for_scales(value_scale(tile), tile_keys);
  }
  void ask_for_scales(const float* first, int64_t count) const {
    const char* place = reinterpret_cast<const char*>(first) + ahead_of(first) * static_cast<int64_t>(sizeof(Stored));
    for (int64_t line = 0; line < count * static_cast<int64_t>(sizeof(float)); line += line_bytes) {
      prefetch_near(place + line);
    }
  }
  const float* scales(int64_t offset, const Tile& tile) const {
    return reinterpret_cast<const float*>(page + tile.index * problem.pages.tile_bytes + offset);
  }
};

// The keys around the visible ones that a product takes at once.
template <class P>
Visible widened(const Visible& visible) {
  constexpr int64_t count = P::units_together * P::products;
  return {visible.first / count * count, (visible.last + count - 1) / count * count, visible.whole};
}
// The queries of a strip as codes, [units of d_k][rows], with what a code of each row is worth and what the means of
// the keys add to its scores. A query that is not finite makes its row NaN.
template <class P>
void code_strip(Run<P>& run, const Matrix& queries, const Strip& strip, typename P::Unit* target) {
  const Pages& pages = run.problem.pages;
  const int64_t columns = run.units * P::products;
  const int64_t whole = (columns + lanes<float> - 1) / lanes<float> * lanes<float>;
  const int64_t place = (run.item.batch * run.problem.key_heads + run.item.key_head) * pages.key_columns;
  const auto largest = static_cast<float>(P::largest_query(columns));
  auto* numbers = reinterpret_cast<float*>(run.scratch.copies);
  auto* codes =
      reinterpret_cast<typename P::Query*>(run.scratch.copies);  // each after the number it is made of was read
  for (int row = 0; row < strip.rows; ++row) {
    const int64_t index = strip.first_row + row;
    read_numbers(queries.type, queries.at(index, 0), queries.column, queries.columns, numbers);
    for (int64_t column = queries.columns; column < whole; ++column) numbers[column] = 0;
    Vector<float> top = {}, offset = {}, nothing = {};
    for (int64_t column = 0; column < whole; column += lanes<float>) {
      Vector<float> number = load(numbers + column);
      nothing += number - number;
      if (pages.key_means) offset = fma(number, load(pages.key_means + place + column), offset);
      if (pages.key_factors) number *= load(pages.key_factors + place + column);
      top = maximum(number < Vector<float>{} ? -number : number, top);
      store(numbers + column, number);
    }
    const bool finite = sum_of<float>(nothing) == 0;
    const Steps steps(splat(finite ? largest_of(top) : 0.0f), largest);
    run.scratch.row_scale[index] = run.scale * (finite ? steps.worth[0] : sum_of<float>(nothing));
    run.scratch.row_offset[index] = run.scale * sum_of<float>(offset);
    const int64_t group = run.key_group() * P::products;
    for (int64_t first = 0, start = row; first < columns; first += group, start += strip.rows) {
      Vector<int32_t> total = {};
      for (int64_t column = first; column < smaller(first + group, whole); column += lanes<float>) {
        const Vector<int32_t> whole_numbers = nearest(load(numbers + column) * steps.factor);
        total += finite ? whole_numbers : Vector<int32_t>{};
        store_codes(codes + column, finite ? whole_numbers : Vector<int32_t>{});
      }
      run.starts_of(strip)[start] = -P::added_to_keys * sum_of<int32_t>(total);
    }
    for (int64_t unit = 0; unit < run.units; ++unit) {
      std::memcpy(target + unit * strip.rows + row, codes + unit * P::products, sizeof *target);
    }
  }
}

template <class P>
void pack_queries(Run<P>& run) {
  const Matrix queries = query_matrix(run.problem, run.item, run.problem.query, run.problem.width);
  for (int64_t index = 0; index < run.strips; ++index) {
    const Strip strip = run.strip(index);
    auto* target = run.scratch.queries + strip.first_row * run.units;
    if constexpr (P::coded) {
      code_strip(run, queries, strip, target);
    } else if constexpr (P::query_rows) {
      pack_query_rows<P>(queries, strip.first_row, strip.rows, target);
    } else {
      pack_strip<P>(queries, strip.first_row, strip.rows, target, run.scratch.copies);
    }
  }
  if (P::scale_queries(run.scratch.queries, run.rows * run.units, run.scale)) run.scale = 1;
}

// The panels of a tile that hold visible keys: [first, last).
struct PanelRange {
  int64_t first, last;
};
template <class P>
PanelRange panels_of(const Visible& visible) {
  return {visible.first / panel_lanes<P>, (visible.last + panel_lanes<P> - 1) / panel_lanes<P>};
}

template <class P>
const typename P::Stored* key_panel(const Run<P>& run, const Tile& tile, int64_t panel) {
  return run.packed_keys + tile.index * run.key_step + panel * stored_units<P>(run.units) * panel_lanes<P>;
}

// Whoever needs a panel of the current block's keys first packs it, so it is still in the nearest cache for the
// product.
template <class P>
void pack_keys(Run<P>& run, const Tile& tile, int64_t panel) {
  if constexpr (!P::coded) {
    const uint64_t bit = uint64_t{1} << panel;
    if (run.lies_packed() || run.panels_done[tile.index] & bit) return;
    auto* target = run.scratch.keys + (tile.index * tile_panels<P> + panel) * run.units * panel_lanes<P>;
    pack_key_panel<P>(run.keys, run.row_of(tile) + panel * panel_lanes<P>, target, run.scratch.copies);
    run.panels_done[tile.index] |= bit;
  }
}

// The tile's values from a panel and a unit on.
template <class P>
Panels<typename P::Stored> value_panels(const Run<P>& run, const Tile& tile, int64_t panel, int64_t unit) {
  using Stored = typename P::Stored;
  if (run.values_in_place) {
    const char* row = run.values.at(tile.first_key + unit, panel * panel_lanes<P>);
    return {reinterpret_cast<const Stored*>(row), run.values.row / static_cast<int64_t>(sizeof(Stored)),
            panel_lanes<P>};
  }
  constexpr int64_t panel_step = tile_units<P> / P::units_loaded * panel_lanes<P>;
  const Stored* values = run.packed_values + tile.index * run.value_step + panel * panel_step;
  return {values + stored_units<P>(unit) * panel_lanes<P>, panel_lanes<P>, panel_step};
}

template <class P>
void pack_values(Run<P>& run, const Tile& tile) {
  if constexpr (!P::coded) {
    if (run.values_in_place || run.lies_packed() || run.values_done[tile.index]) return;
    const int64_t count = widened<P>({0, tile.high, false}).last;  // no further: a short tile's packing would show
    pack_rows<P>(run.values, run.row_of(tile), count, run.scratch.values + tile.index * run.value_step,
                 tile_units<P> * panel_lanes<P>, run.scratch.copies);
    run.values_done[tile.index] = true;
  }
}

// Rows of a page, which are keys and values at once: floats are packed when they are needed, codes all together.
template <class P>
void open_rows(Run<P>& run) {
  const Problem& problem = run.problem;
  if constexpr (P::coded) {
    using Stored = typename P::Stored;
    const int64_t units = stored_units<P>(run.units);
    for (int64_t tile = 0; tile < block_tiles; ++tile) {
      const auto* rows = reinterpret_cast<const Stored*>(run.page + tile * problem.pages.tile_bytes);
      pack_unit_rows<P>(rows, units, reinterpret_cast<Stored*>(run.scratch.keys) + tile * run.key_step);
      pack_code_values<P>(rows, units, problem.value_width,
                          reinterpret_cast<Stored*>(run.scratch.values) + tile * run.value_step);
    }
  } else {
    const Type type = problem.pages.type;
    run.keys = {run.page, problem.pages.row_bytes, size_of(type), block_keys, problem.width, type};
    run.values = run.keys;
    run.values.columns = problem.value_width;
  }
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
