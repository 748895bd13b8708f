// What a mask shows of a rectangle of queries and keys: nothing, everything, or some of it, decided from positions
// alone, before any key is read; and for a tile that is partly visible, one bit for each of its keys in each row.
#pragma once

#include "kernels.h"
#include "storage.h"

namespace softlookup::SOFTLOOKUP_ISA {
namespace {

enum class Label { empty, partial, full };

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline int64_t query_start_of(const Problem& problem, int64_t batch) {
  return problem.query_start[batch * problem.query_start_step];
}

// Local index of a row's query.
inline int64_t query_index(const Problem& problem, int64_t row) { return problem.rows ? problem.rows[row] : row; }

// The byte offset of one batch item: leading axes are walked from the last, as NumPy lays them out.
inline int64_t batch_offset(const Problem& problem, const Tensor& tensor, int64_t batch) {
  int64_t offset = 0;
  for (int axis = problem.leading_axes - 1; axis >= 0; --axis) {
    offset += batch % problem.leading_shape[axis] * tensor.leading[axis];
    batch /= problem.leading_shape[axis];
  }
  return offset;
}

// Queries first_query .. last_query and keys first_key .. last_key, both ends included, as local indices.
struct Rectangle {
  int64_t batch;
  int64_t first_query, last_query;
  int64_t first_key, last_key;
};

inline Label label_of_band(int64_t first, int64_t last, int64_t low, int64_t high) {
  if (last < low || first > high) return Label::empty;
  return first >= low && last <= high ? Label::full : Label::partial;
}

inline Label label_of_window(const Problem& problem, const MaskNode& node, const Rectangle& r) {
  const int64_t shift =
      query_start_of(problem, r.batch) - problem.key_start;  // local key index of a query's own position
  const int64_t first = r.first_query + shift;
  const int64_t last = r.last_query + shift;
  if (r.first_key > last + node.right || r.last_key < first - node.left) return Label::empty;
  return r.last_key <= first + node.right && r.first_key >= last - node.left ? Label::full : Label::partial;
}

inline Label both(Label a, Label b) {
  if (a == Label::empty || b == Label::empty) return Label::empty;
  return a == Label::full && b == Label::full ? Label::full : Label::partial;
}
inline Label opposite(Label a) { return a == Label::partial ? a : a == Label::empty ? Label::full : Label::empty; }

// The keys (or queries) that a length lets through: [low, high].
struct Band {
  int64_t low, high;
};
inline Band key_band(const Problem& problem, const MaskNode& node, int64_t batch) {
  const int64_t length = node.key_lengths[batch * node.key_lengths_step];
  return node.padded_left ? Band{problem.keys - length, problem.keys - 1} : Band{0, length - 1};
}
inline Band query_band(const Problem& problem, const MaskNode& node, int64_t batch) {
  if (!node.query_lengths) return Band{0, problem.queries - 1};
  const int64_t length = node.query_lengths[batch * node.query_lengths_step];
  return node.padded_left ? Band{problem.queries - length, problem.queries - 1} : Band{0, length - 1};
}

inline Label label_of_lengths(const Problem& problem, const MaskNode& node, const Rectangle& r) {
  const Band keys = key_band(problem, node, r.batch);
  const Band queries = query_band(problem, node, r.batch);
  return both(label_of_band(r.first_key, r.last_key, keys.low, keys.high),
              label_of_band(r.first_query, r.last_query, queries.low, queries.high));
}

inline Label label_of(const Problem& problem, const Rectangle& rectangle) {
  if (problem.mask_nodes == 0) return Label::full;
  Label stack[most_mask_nodes];
  int top = 0;
  for (int i = 0; i < problem.mask_nodes; ++i) {
    const MaskNode& node = problem.mask[i];
    switch (node.kind) {
      case MaskKind::full:
        stack[top++] = Label::full;
        break;
      case MaskKind::window:
        stack[top++] = label_of_window(problem, node, rectangle);
        break;
      case MaskKind::lengths:
        stack[top++] = label_of_lengths(problem, node, rectangle);
        break;
      case MaskKind::dense:
      case MaskKind::predicate:
        stack[top++] = Label::partial;
        break;
      case MaskKind::conjunction:
        --top;
        stack[top - 1] = both(stack[top - 1], stack[top]);
        break;
      case MaskKind::disjunction:
        --top;
        stack[top - 1] = opposite(both(opposite(stack[top - 1]), opposite(stack[top])));
        break;
      case MaskKind::negation:
        stack[top - 1] = opposite(stack[top - 1]);
        break;
    }
  }
  return stack[0];
}

// ---- one bit for each key of a tile ----

struct Bits {
  uint64_t word[2];
};

inline uint64_t low_bits(int64_t count) {
  return count <= 0 ? 0 : count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}
// Bits low .. high - 1.
inline Bits range_bits(int64_t low, int64_t high) {
  return {{low_bits(high) & ~low_bits(low), low_bits(high - 64) & ~low_bits(low - 64)}};
}
inline bool any_bit(Bits bits) { return (bits.word[0] | bits.word[1]) != 0; }
inline int64_t count_bits(Bits bits) { return __builtin_popcountll(bits.word[0]) + __builtin_popcountll(bits.word[1]); }
inline int64_t first_bit(Bits bits) {
  return bits.word[0] ? __builtin_ctzll(bits.word[0]) : 64 + __builtin_ctzll(bits.word[1]);
}
inline int64_t last_bit(Bits bits) {
  return bits.word[1] ? 127 - __builtin_clzll(bits.word[1]) : 63 - __builtin_clzll(bits.word[0]);
}
inline bool bit_at(const Bits& bits, int64_t key) { return bits.word[key >> 6] >> (key & 63) & 1; }
inline Bits operator&(Bits a, Bits b) { return {{a.word[0] & b.word[0], a.word[1] & b.word[1]}}; }
inline Bits operator|(Bits a, Bits b) { return {{a.word[0] | b.word[0], a.word[1] | b.word[1]}}; }
inline Bits operator~(Bits a) { return {{~a.word[0], ~a.word[1]}}; }

// One strip of an item's rows; row r belongs to query first_row + r, query-major over the heads of the group.
struct Strip {
  const Problem* problem;
  const Item* item;
  int64_t first_row;  // within the item
  int rows;

  int64_t group() const { return problem->query_heads / problem->key_heads; }
  int64_t query(int row) const { return query_index(*problem, item->first_query + (first_row + row) / group()); }
  int64_t head(int row) const { return item->key_head * group() + (first_row + row) % group(); }
};

// Of at most `most` rows each.
inline int64_t strips_of(int64_t rows, int most) { return (rows + most - 1) / most; }

// Strips of nearly equal height: 13 rows are 7 and 6, not 12 and 1.
inline Strip strip_at(const Problem& problem, const Item& item, int64_t rows, int most, int64_t index) {
  const int64_t height = rows / strips_of(rows, most);
  const int64_t taller = rows % strips_of(rows, most);
  const int64_t first = index * height + smaller(index, taller);
  return {&problem, &item, first, static_cast<int>(height + (index < taller ? 1 : 0))};
}

// Keys or values of an item's head.
inline Matrix key_matrix(const Problem& problem, const Item& item, const Tensor& tensor, int64_t columns) {
  if (!tensor.data) return {nullptr, 0, 0, 0, columns, tensor.type};
  const char* data = tensor.data + batch_offset(problem, tensor, item.batch) + item.key_head * tensor.head;
  return {data, tensor.row, tensor.column, problem.keys, columns, tensor.type};
}

// The rows of an item, query-major over the heads of its group.
inline Matrix query_matrix(const Problem& problem, const Item& item, const Tensor& tensor, int64_t columns) {
  const int64_t group = problem.query_heads / problem.key_heads;
  const char* data = tensor.data + batch_offset(problem, tensor, item.batch) + item.key_head * group * tensor.head;
  const int64_t* chosen = problem.rows ? problem.rows + item.first_query : nullptr;
  if (!chosen) data += item.first_query * tensor.row;
  return {data, tensor.row, tensor.column, item.queries * group, columns, tensor.type, group, tensor.head, chosen};
}

// A tile's place: local index of its first key (which may lie outside), and the part of it that exists.
struct Tile {
  int64_t first_key;
  int64_t low, high;  // existing keys are first_key + [low, high)
  int64_t index;      // 0 .. 3 within its block
};

inline Tile tile_at(const Problem& problem, int64_t block, int64_t index) {
  const int64_t first = block * block_keys + index * tile_keys - problem.key_start;
  return {first, larger(0, -first), smaller(tile_keys, problem.keys - first), index};
}

// Eight bytes of 0 and non-0 to eight bits.
inline uint64_t bits_of_bytes(uint64_t bytes) {
  const uint64_t high = 0x8080808080808080u;
  const uint64_t set = (((bytes & ~high) + ~high) | bytes) & high;  // the top bit of every byte that is not zero
  return ((set >> 7) * 0x0102040810204080u) >> 56;
}

inline Bits dense_bits(const char* row, int64_t step, int64_t low, int64_t high) {
  Bits bits = {{0, 0}};
  int64_t key = low;
  if (step == 1) {
    for (; key + 8 <= high; key += 8) {
      uint64_t bytes;
      std::memcpy(&bytes, row + key, sizeof bytes);
      const uint64_t eight = bits_of_bytes(bytes);
      bits.word[key >> 6] |= eight << (key & 63);
      if ((key & 63) > 56) bits.word[1] |= (key >> 6) == 0 ? eight >> (64 - (key & 63)) : 0;
    }
  }
  for (; key < high; ++key) bits.word[key >> 6] |= uint64_t{row[key * step] != 0} << (key & 63);
  return bits;
}

inline Bits node_bits(const MaskNode& node, const Strip& strip, int row, const Tile& tile, const uint64_t* predicted) {
  const Problem& problem = *strip.problem;
  const int64_t batch = strip.item->batch;
  const int64_t query = strip.query(row);
  switch (node.kind) {
    case MaskKind::window: {
      const int64_t own = query + query_start_of(problem, batch) - problem.key_start - tile.first_key;
      return range_bits(larger(own - node.left, 0), smaller(own + node.right, tile_keys) + 1);
    }
    case MaskKind::lengths: {
      const Band keys = key_band(problem, node, batch);
      const Band queries = query_band(problem, node, batch);
      if (query < queries.low || query > queries.high) return {{0, 0}};
      return range_bits(keys.low - tile.first_key, keys.high + 1 - tile.first_key);
    }
    case MaskKind::dense: {
      const Tensor& dense = node.dense;
      const char* data =
          dense.data + batch_offset(problem, dense, batch) + strip.head(row) * dense.head + query * dense.row;
      return dense_bits(data + tile.first_key * dense.column, dense.column, tile.low, tile.high);
    }
    case MaskKind::predicate: {
      const int64_t rows = strip.item->queries * strip.group();
      const uint64_t* words =
          predicted + (node.predicate * rows + strip.first_row + row) * (block_keys / 64) + tile.index * 2;
      return {{words[0], words[1]}};
    }
    default:
      return {{~uint64_t{0}, ~uint64_t{0}}};
  }
}

// Which existing keys of the tile one row may attend to.
inline Bits row_bits(const Strip& strip, int row, const Tile& tile, const uint64_t* predicted) {
  const Problem& problem = *strip.problem;
  const Bits existing = range_bits(tile.low, tile.high);
  if (problem.mask_nodes == 0) return existing;
  Bits stack[most_mask_nodes];
  int top = 0;
  for (int i = 0; i < problem.mask_nodes; ++i) {
    const MaskNode& node = problem.mask[i];
    switch (node.kind) {
      case MaskKind::conjunction:
        --top;
        stack[top - 1] = stack[top - 1] & stack[top];
        break;
      case MaskKind::disjunction:
        --top;
        stack[top - 1] = stack[top - 1] | stack[top];
        break;
      case MaskKind::negation:
        stack[top - 1] = ~stack[top - 1];
        break;
      default:
        stack[top++] = node_bits(node, strip, row, tile, predicted);
        break;
    }
  }
  return stack[0] & existing;
}

// ---- the range of keys that an item can see at all, so that what lies outside costs nothing ----

inline Band hull_of(const Problem& problem, const MaskNode& node, const Rectangle& r) {
  const Band everything = {0, problem.keys - 1};
  if (node.kind == MaskKind::window) {
    const int64_t shift = query_start_of(problem, r.batch) - problem.key_start;
    return {larger(0, r.first_query + shift - node.left), smaller(problem.keys - 1, r.last_query + shift + node.right)};
  }
  if (node.kind == MaskKind::lengths) {
    const Band queries = query_band(problem, node, r.batch);
    if (r.last_query < queries.low || r.first_query > queries.high) return {0, -1};
    return key_band(problem, node, r.batch);
  }
  return everything;
}

inline Band visible_keys(const Problem& problem, const Rectangle& rectangle) {
  const Band everything = {0, problem.keys - 1};
  if (problem.mask_nodes == 0) return everything;
  Band stack[most_mask_nodes];
  int top = 0;
  for (int i = 0; i < problem.mask_nodes; ++i) {
    const MaskNode& node = problem.mask[i];
    switch (node.kind) {
      case MaskKind::conjunction:
        --top;
        stack[top - 1] = {larger(stack[top - 1].low, stack[top].low), smaller(stack[top - 1].high, stack[top].high)};
        break;
      case MaskKind::disjunction: {
        --top;
        const Band a = stack[top - 1];
        const Band b = stack[top];
        if (a.low > a.high || b.low > b.high) {
          stack[top - 1] = a.low > a.high ? b : a;
        } else {
          stack[top - 1] = {smaller(a.low, b.low), larger(a.high, b.high)};
        }
        break;
      }
      case MaskKind::negation:
        stack[top - 1] = everything;
        break;
      default:
        stack[top++] = hull_of(problem, node, rectangle);
        break;
    }
  }
  return stack[0];
}

// The lowest and the highest local query index of rows [first, first + count) of the run.
inline Band query_hull(const Problem& problem, int64_t first, int64_t count) {
  if (!problem.rows) return {first, first + count - 1};
  Band hull = {problem.rows[first], problem.rows[first]};
  for (int64_t i = first + 1; i < first + count; ++i) {
    hull = {smaller(hull.low, problem.rows[i]), larger(hull.high, problem.rows[i])};
  }
  return hull;
}

}  // namespace
}  // namespace softlookup::SOFTLOOKUP_ISA
