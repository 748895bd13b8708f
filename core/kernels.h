// What the driver and the kernels of one instruction set say to each other: plain structs, and the table of function
// pointers that each instruction set fills. No standard-library templates here: this header is compiled with every
// instruction set's flags, and a shared inline function could end up in the binary with the wrong ones.
#pragma once

#include <cstddef>
#include <cstdint>

namespace softlookup {

// The last two are codes in a cache: no array of a call has them.
enum class Type : int { float32 = 0, float64 = 1, float16 = 2, bfloat16 = 3, int8 = 4, int4 = 5 };
constexpr int types = 6;

constexpr int64_t size_of(Type type) { return type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2; }
constexpr bool is_coded(Type type) { return type == Type::int8 || type == Type::int4; }

// The bits rule: keys fall into blocks of 512 at absolute positions, each of four tiles of 128 keys.
constexpr int64_t block_keys = 512;
constexpr int64_t tile_keys = 128;
constexpr int64_t block_tiles = block_keys / tile_keys;

// The block of an absolute position: division rounds down.
constexpr int64_t block_of(int64_t position) { return position / block_keys - (position % block_keys < 0 ? 1 : 0); }

constexpr int most_leading_axes = 61;
constexpr int most_mask_nodes = 256;

// Numbers kept for every row when statistics are asked for; the order is the one that Python reads.
enum Moment : int {
  moment_maximum,
  moment_sum,
  moment_first,
  moment_second,
  moment_squares,
  moment_column,
  moment_argmax,
  moment_visible,
  moment_first_score,
  moment_count
};

// An array [leading..., heads, rows, columns] with strides in bytes.
struct Tensor {
  char* data = nullptr;
  Type type = Type::float32;
  int64_t column = 0;
  int64_t row = 0;
  int64_t head = 0;
  int64_t leading[most_leading_axes] = {};
};

enum class MaskKind { full, window, lengths, dense, predicate, conjunction, disjunction, negation };

// Beyond any sum of two positions and a length, and twice it is still a number.
constexpr int64_t unlimited = int64_t{1} << 62;

// One step of a mask in postfix order.
struct MaskNode {
  MaskKind kind = MaskKind::full;
  int64_t left = unlimited;  // window
  int64_t right = unlimited;
  const int64_t* key_lengths = nullptr;  // lengths; a step of 0 means one length for the whole batch
  const int64_t* query_lengths = nullptr;
  int64_t key_lengths_step = 0;
  int64_t query_lengths_step = 0;
  bool padded_left = false;
  Tensor dense;       // one byte an element
  int predicate = 0;  // index among the predicates
};

// A predicate fills bits [rows][block words] for keys first_key .. first_key + keys of one block; false stops the run.
struct PredicateCall {
  int predicate;
  int64_t batch;
  const int64_t* heads;    // [rows]
  const int64_t* queries;  // [rows], absolute positions
  int64_t rows;
  int64_t first_key;  // absolute position
  int64_t keys;
  int64_t first_bit;  // bit of first_key within the block
  uint64_t* bits;
};
using PredicateFunction = bool (*)(void* context, const PredicateCall& call);

// Codes run from lowest_code to largest_code.
constexpr int largest_code(Type type) { return type == Type::int8 ? 127 : 7; }
constexpr int lowest_code(Type type) { return type == Type::int8 ? -127 : -8; }
// So many columns of an int4 key share a scale; of any other row of codes, all.
constexpr int64_t group_columns = 32;

// Keys and values of a cache: pages of one block each, in which the heads of one batch item follow one another. A head
// holds its tiles in the order in which they are read: the keys of a tile, for codes their scales, its values, and for
// codes theirs; so decoding reads one stream. Or it holds rows [tile_keys][d_k] of keys whose first columns are the
// values, with one scale. Keys and values are packed as the kernels of one instruction set read them.
struct Pages {
  const char* const* table = nullptr;  // [batch][blocks]; null: no such page. A null table: no cache
  int64_t blocks = 0;
  Type type = Type::float32;
  bool rows = false;         // keys as rows, not packed
  int64_t row_bytes = 0;     // of these
  int64_t head_bytes = 0;    // from one head of a page to the next
  int64_t tile_bytes = 0;    // from one tile of a head to the next
  int64_t values = 0;        // from the start of a tile to its values, and so on
  int64_t key_scales = 0;    // float [key_groups][tile_keys]
  int64_t value_scales = 0;  // float [tile_keys]
  int64_t key_groups = 1;    // of columns
  // A code stands for mean + factor * scale * code, with the mean and factor of its column; null: 0 and 1.
  const float* key_means = nullptr;  // [batch][key_heads][key_columns], zeros past d_k
  const float* key_factors = nullptr;
  int64_t key_columns = 0;
  const float* value_means = nullptr;  // [batch][key_heads][value_columns]
  const float* value_factors = nullptr;
  int64_t value_columns = 0;
};

struct Problem {
  int leading_axes = 0;
  int64_t leading_shape[most_leading_axes] = {};
  int64_t batch = 1;
  int64_t query_heads = 0;
  int64_t key_heads = 0;
  int64_t queries = 0;  // N
  int64_t keys = 0;     // M
  int64_t width = 0;    // d_k
  int64_t value_width = 0;
  Tensor query, key, value, out, bias;  // bias.data is null where there is none
  Pages pages;                          // instead of key and value, where its table is not null
  const double* sinks = nullptr;        // [query_heads]
  double scale = 1.0;
  double softcap = 0.0;  // 0: none
  const int64_t* query_start = nullptr;
  int64_t query_start_step = 0;
  int64_t key_start = 0;
  const MaskNode* mask = nullptr;
  int mask_nodes = 0;  // 0: everything is visible
  int predicates = 0;
  int64_t output_rows = 0;        // rows of `out`: N, or for `scores` the number of chosen rows
  const int64_t* rows = nullptr;  // for `scores`: local query index of each row of `out`; null: its own
  int64_t head_offset = 0;
  double* moments = nullptr;  // [batch, query_heads, queries, moment_count]
  PredicateFunction predicate = nullptr;
  void* context = nullptr;  // of predicate and stopped
  bool (*stopped)(void* context) = nullptr;
};

// The unit of work: some queries of one batch item, with all query heads of one key head as rows (query-major).
struct Item {
  int64_t batch = 0;
  int64_t key_head = 0;
  int64_t first_query = 0;
  int64_t queries = 0;
};

struct BlockRange {
  int64_t first = 0;
  int64_t last = 0;  // one past the end
};

// What the backward pass reads and fills beside the problem. Arrays of rows are [batch, query_heads, queries].
struct Gradients {
  Tensor output;                          // of the forward pass
  Tensor output_slope;                    // dout, of the type of the output
  const double* top = nullptr;            // largest score of each row, -inf where it is empty
  const double* share = nullptr;          // the weight of that score
  const double* lse_slope = nullptr;      // dlse, or null
  double* delta = nullptr;                // rowsum(dout * out) - dlse
  Tensor query, key, value;               // gradients, all zero before; null data where not asked
  Tensor bias;                            // null data where not asked; column stride never 0
  bool bias_is_shared = false;            // several heads or batch items add to one number of the bias gradient
  char* query_sums = nullptr;             // [items of one (batch, key head)][rows][padded width], zero before
  int64_t* turns = nullptr;               // the block whose turn it is, for each tile of rows
  bool (*wait)(void* context) = nullptr;  // lets others run; false: give up
  void* wait_context = nullptr;
};

// The kernels of one arithmetic (float32, float64, or pairs of bfloat16) under one instruction set.
struct Arithmetic {
  int64_t (*scratch_bytes)(const Problem& problem, int64_t rows);  // per thread
  int64_t (*state_bytes)(const Problem& problem, int64_t rows);    // one partial result
  BlockRange (*visible_blocks)(const Problem& problem, const Item& item);
  void (*reset)(const Problem& problem, const Item& item, char* state);
  // Folds the blocks of a range into the state, left to right; or, where `state_step` is not zero, makes of every block
  // a state of its own, so many bytes apart.
  void (*attend)(const Problem& problem, const Item& item, BlockRange blocks, char* state, int64_t state_step,
                 char* scratch);
  void (*fold)(const Problem& problem, const Item& item, char* state, const char* next);
  void (*finish)(const Problem& problem, const Item& item, char* state, char* scratch);
  void (*scores)(const Problem& problem, const Item& item, BlockRange blocks, char* scratch);
  int64_t (*gradient_queries)(const Problem& problem);  // of one tile of rows
  int64_t (*gradient_scratch_bytes)(const Problem& problem);
  int64_t (*query_sum_bytes)(const Problem& problem);  // of one row
  void (*start_gradients)(const Problem& problem, const Gradients& gradients, const Item& tile, char* scratch);
  // One block of keys against all rows of one key head.
  void (*differentiate)(const Problem& problem, const Gradients& gradients, int64_t batch, int64_t key_head,
                        int64_t block, char* scratch);
};

// How the panels of a cache are cut: `lanes` keys (or columns of values) side by side; a stored unit of one lane holds
// `elements` successive columns (or keys); units come in groups of `units_together`.
struct PanelLayout {
  int64_t lanes;
  int64_t elements;
  int64_t unit_bytes;
  int64_t units_together;
};

// Packed keys of eight 4-bit codes a unit have 8 added to each code, which makes them unsigned.
constexpr uint32_t added_to_nibbles = 0x88888888u;

// In which bit of such a unit code i begins: the first four are the low halves of its bytes.
constexpr int nibble_place(int64_t i) { return static_cast<int>(8 * (i % 4) + 4 * (i / 4)); }

// What reads the pages of a cache of one type.
struct Cached {
  const Arithmetic* arithmetic;
  PanelLayout layout;
};

struct Kernels {
  const char* name;
  const Arithmetic* arithmetic[4];  // by Type of q, k and v
  Cached cached[types];             // by Type of the cache; none of float64
};

}  // namespace softlookup
