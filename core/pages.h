// How rows of keys and values get into the pages of a cache, and out of them again. A row is first made a row of stored
// units, then its units are put where the panels want them; so there is one writer for every type and instruction set.
#pragma once

#include <vector>

#include "kernels.h"

namespace softlookup {

// What one head of a page holds, and where.
struct PageFormat {
  Type type = Type::float32;
  PanelLayout layout = {};
  int64_t width = 0;        // d_k
  int64_t value_width = 0;  // d_v
  bool rows = false;        // see Pages
  int64_t units = 0;        // stored, of one key
  int64_t row_bytes = 0;    // of these
  int64_t values = 0;       // bytes from the start of a tile, as the next two
  int64_t key_scales = 0;
  int64_t value_scales = 0;
  int64_t key_group = 0;  // columns of a key that share a scale
  int64_t key_groups = 1;
  int64_t tile_bytes = 0;
  int64_t head_bytes = 0;

  PageFormat(Type type, const PanelLayout& layout, int64_t width, int64_t value_width, bool rows);
};

// The numbers of one column of codes: see Pages. Null: 0 and 1.
struct Columns {
  const float* means = nullptr;
  const float* factors = nullptr;
};

// What a cache's own element is: a float of its type, or one byte for a code.
int64_t element_bytes(Type type);

// One key and its value, as contiguous elements, with their scales where they are codes: of the key's groups, and of
// the value. No value where pages hold rows.
struct Slot {
  char* key;
  char* value;
  float* key_scales;
  float* value_scale;
};

// Writes and reads the slots of one head of a page.
class PageHead {
 public:
  PageHead(const PageFormat& format, char* head) : format_(format), head_(head), units_(format.row_bytes) {}

  void write(int64_t index, const Slot& slot);
  void read(int64_t index, Slot& slot);

 private:
  void write_value(int64_t index, const char* value);
  void read_value(int64_t index, char* value) const;
  char* tile_of(int64_t index) const { return head_ + index / tile_keys * format_.tile_bytes; }
  float& scale(int64_t area, int64_t group, int64_t index) const {
    return reinterpret_cast<float*>(tile_of(index) + area)[group * tile_keys + index % tile_keys];
  }

  const PageFormat& format_;
  char* head_;
  std::vector<char> units_;  // of one key
};

// Numbers `step` bytes apart, widened to float.
void read_floats(Type type, const char* source, int64_t step, int64_t count, float* numbers);

// Multiplies blocks of neighbouring numbers, a power of two each, by the Walsh-Hadamard matrix over sqrt(block): sums
// and differences of halves, in an order that does not depend on what stands around a block.
void rotate_blocks(float* numbers, int64_t blocks, int64_t block);

// What codes are made by.
struct Coding {
  Type type;
  int64_t group;  // numbers that share a scale
  bool signs;     // whether a scale may be negative
};

// Makes codes of numbers, group by group, and says what a code of each is worth; false where a number is not finite.
// `rest` is overwritten with the numbers less their means, over their factors.
bool make_codes(const Coding& coding, const float* numbers, int64_t count, const Columns& columns,
                std::vector<float>& rest, int8_t* codes, float* scales);

}  // namespace softlookup
