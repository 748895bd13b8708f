#define SOFTLOOKUP_ISA pages  // the primitives, compiled for any CPU
#include "pages.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "storage.h"

namespace softlookup {

using namespace SOFTLOOKUP_ISA;

namespace {

int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// One row of elements as a row of stored units, zeros behind it.
void to_units(const PageFormat& format, const char* elements, char* units) {
  std::memset(units, 0, static_cast<size_t>(format.row_bytes));
  if (format.type != Type::int4) {
    std::memcpy(units, elements, static_cast<size_t>(format.width * element_bytes(format.type)));
    return;
  }
  auto* words = reinterpret_cast<uint32_t*>(units);
  for (int64_t column = 0; column < format.width; ++column) {
    words[column / 8] |= (static_cast<uint32_t>(elements[column]) & 0xfu) << nibble_place(column % 8);
  }
}

int8_t code_of_nibble(uint32_t unit, int place) {
  const auto bits = static_cast<int>((unit >> place) & 0xfu);
  return static_cast<int8_t>(bits < 8 ? bits : bits - 16);
}

void from_units(const PageFormat& format, const char* units, char* elements) {
  if (format.type != Type::int4) {
    std::memcpy(elements, units, static_cast<size_t>(format.width * element_bytes(format.type)));
    return;
  }
  const auto* words = reinterpret_cast<const uint32_t*>(units);
  for (int64_t column = 0; column < format.width; ++column) {
    elements[column] = code_of_nibble(words[column / 8], nibble_place(column % 8));
  }
}

// Where the units of one key of a tile begin; from one to the next it is a whole panel of lanes.
int64_t key_place(const PageFormat& format, int64_t key) {
  const int64_t lanes = format.layout.lanes;
  return key / lanes * format.units * lanes + key % lanes;
}

// Calls function with a number of `bytes` bytes.
template <class Function>
void with_bytes(int64_t bytes, const Function& function) {
  if (bytes == 1) {
    function(uint8_t{});
  } else if (bytes == 2) {
    function(uint16_t{});
  } else {
    function(uint32_t{});
  }
}

// Calls function(first column, columns, place) for each panel of a tile's values: where the unit of one key begins.
template <class Function>
void for_each_panel(const PageFormat& format, int64_t key, const Function& function) {
  const PanelLayout& layout = format.layout;
  const int64_t panel_bytes = tile_keys / layout.elements * layout.lanes * layout.unit_bytes;
  int64_t place = format.values + key / layout.elements * layout.lanes * layout.unit_bytes;
  for (int64_t first = 0; first < format.value_width; first += layout.lanes, place += panel_bytes) {
    function(first, std::min(layout.lanes, format.value_width - first), place);
  }
}

}  // namespace

int64_t element_bytes(Type type) { return is_coded(type) ? 1 : size_of(type); }

PageFormat::PageFormat(Type type_, const PanelLayout& layout_, int64_t width_, int64_t value_width_, bool rows_)
    : type(type_), layout(layout_), width(width_), value_width(value_width_), rows(rows_) {
  constexpr int64_t line_bytes = 64;
  units = rounded_up((width + layout.elements - 1) / layout.elements, layout.units_together);
  row_bytes = units * layout.unit_bytes;
  const int64_t value_units = rows ? 0 : tile_keys / layout.elements * rounded_up(value_width, layout.lanes);
  const int64_t scale_bytes = is_coded(type) ? tile_keys * static_cast<int64_t>(sizeof(float)) : 0;
  key_group = type == Type::int4 && !rows ? group_columns : width;
  key_groups = (width + key_group - 1) / key_group;
  key_scales = rounded_up(tile_keys * row_bytes, line_bytes);
  values = rows ? 0 : key_scales + key_groups * scale_bytes;
  value_scales = rows ? key_scales : values + rounded_up(value_units * layout.unit_bytes, line_bytes);
  tile_bytes = value_scales + scale_bytes;
  head_bytes = block_tiles * tile_bytes;
}

void PageHead::write(int64_t index, const Slot& slot) {
  if (is_coded(format_.type)) {
    if (!format_.rows) scale(format_.value_scales, 0, index) = *slot.value_scale;
    for (int64_t i = 0; i < format_.key_groups; ++i) scale(format_.key_scales, i, index) = slot.key_scales[i];
  }
  if (format_.rows) {
    to_units(format_, slot.key, tile_of(index) + index % tile_keys * format_.row_bytes);
    return;
  }
  to_units(format_, slot.key, units_.data());
  with_bytes(format_.layout.unit_bytes, [&](auto unit) {
    using Unit = decltype(unit);
    Unit* target = reinterpret_cast<Unit*>(tile_of(index)) + key_place(format_, index % tile_keys);
    const Unit* units = reinterpret_cast<const Unit*>(units_.data());
    const auto added = static_cast<Unit>(format_.type == Type::int4 ? added_to_nibbles : 0);
    for (int64_t i = 0; i < format_.units; ++i) target[i * format_.layout.lanes] = units[i] ^ added;
  });
  write_value(index, slot.value);
}

void PageHead::write_value(int64_t index, const char* value) {
  const PanelLayout& layout = format_.layout;
  char* tile = tile_of(index);
  for_each_panel(format_, index % tile_keys, [&](int64_t first, int64_t columns, int64_t place) {
    if (format_.type == Type::int4) {
      auto* target = reinterpret_cast<uint32_t*>(tile + place);
      const int shift = nibble_place(index % layout.elements);
      for (int64_t i = 0; i < columns; ++i) {
        const uint32_t code = static_cast<uint32_t>(value[first + i]) & 0xfu;
        target[i] = (target[i] & ~(0xfu << shift)) | code << shift;
      }
      return;
    }
    with_bytes(element_bytes(format_.type), [&](auto element) {
      using Element = decltype(element);
      Element* target = reinterpret_cast<Element*>(tile + place) + index % layout.elements;
      const Element* source = reinterpret_cast<const Element*>(value) + first;
      for (int64_t i = 0; i < columns; ++i) target[i * layout.elements] = source[i];
    });
  });
}

void PageHead::read(int64_t index, Slot& slot) {
  if (is_coded(format_.type)) {
    if (!format_.rows) *slot.value_scale = scale(format_.value_scales, 0, index);
    for (int64_t i = 0; i < format_.key_groups; ++i) slot.key_scales[i] = scale(format_.key_scales, i, index);
  }
  if (format_.rows) {
    from_units(format_, tile_of(index) + index % tile_keys * format_.row_bytes, slot.key);
    return;
  }
  with_bytes(format_.layout.unit_bytes, [&](auto unit) {
    using Unit = decltype(unit);
    const Unit* source = reinterpret_cast<const Unit*>(tile_of(index)) + key_place(format_, index % tile_keys);
    Unit* units = reinterpret_cast<Unit*>(units_.data());
    const auto added = static_cast<Unit>(format_.type == Type::int4 ? added_to_nibbles : 0);
    for (int64_t i = 0; i < format_.units; ++i) units[i] = source[i * format_.layout.lanes] ^ added;
  });
  from_units(format_, units_.data(), slot.key);
  read_value(index, slot.value);
}

void PageHead::read_value(int64_t index, char* value) const {
  const PanelLayout& layout = format_.layout;
  const char* tile = tile_of(index);
  for_each_panel(format_, index % tile_keys, [&](int64_t first, int64_t columns, int64_t place) {
    if (format_.type == Type::int4) {
      const auto* source = reinterpret_cast<const uint32_t*>(tile + place);
      const int shift = nibble_place(index % layout.elements);
      for (int64_t i = 0; i < columns; ++i) value[first + i] = code_of_nibble(source[i], shift);
      return;
    }
    with_bytes(element_bytes(format_.type), [&](auto element) {
      using Element = decltype(element);
      const Element* source = reinterpret_cast<const Element*>(tile + place) + index % layout.elements;
      Element* target = reinterpret_cast<Element*>(value) + first;
      for (int64_t i = 0; i < columns; ++i) target[i] = source[i * layout.elements];
    });
  });
}

void read_floats(Type type, const char* source, int64_t step, int64_t count, float* numbers) {
  if (type == Type::float32 && step == static_cast<int64_t>(sizeof(float))) {
    std::memcpy(numbers, source, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) numbers[i] = number_at<float>(type, source + i * step);
}

void rotate_blocks(float* numbers, int64_t blocks, int64_t block) {
  const auto factor = static_cast<float>(1 / std::sqrt(static_cast<double>(block)));
  for (const float* end = numbers + blocks * block; numbers != end; numbers += block) {
    for (int64_t half = 1; half < block; half *= 2) {
      for (float* pair = numbers; pair != numbers + block; pair += 2 * half) {
        for (int64_t i = 0; i < half; ++i) {
          const float left = pair[i];
          const float right = pair[half + i];
          pair[i] = left + right;
          pair[half + i] = left - right;
        }
      }
    }
    for (int64_t i = 0; i < block; ++i) numbers[i] *= factor;
  }
}

namespace {

// What a code is worth, so that no number of a group is off by more than half of it. Below half a step beyond the
// last code a number is still as near to that; of the 16 codes of int4 eight are negative, so where a scale may be
// negative the side with the larger number gets those.
float scale_of(const Coding& coding, float highest, float lowest) {
  float scale = std::max(highest, -lowest) / static_cast<float>(largest_code(coding.type));
  if (coding.type == Type::int4) {
    const float most = static_cast<float>(largest_code(Type::int4)) + 0.5f;
    const float least = 0.5f - static_cast<float>(lowest_code(Type::int4));
    scale = std::max(highest / most, -lowest / least);
    const float turned = std::max(-lowest / most, highest / least);
    if (coding.signs && turned < scale) scale = -turned;
  }
  return std::fabs(scale) < Constants<float>::smallest ? 0.0f : scale;
}

// The nearest integers, ties to even, of one group.
void round_group(const Coding& coding, const float* numbers, int64_t count, float scale, int8_t* codes) {
  constexpr float shift = 12582912;  // 1.5 * 2^23: a sum with it has no bits below 1
  const float factor = scale == 0 ? 0.0f : 1 / scale;
  const auto most = static_cast<float>(largest_code(coding.type));
  const auto least = static_cast<float>(lowest_code(coding.type));
  for (int64_t i = 0; i < count; ++i) {
    const float whole = (numbers[i] * factor + shift) - shift;
    codes[i] = static_cast<int8_t>(std::min(std::max(whole, least), most));
  }
}

}  // namespace

bool make_codes(const Coding& coding, const float* numbers, int64_t count, const Columns& columns,
                std::vector<float>& rest, int8_t* codes, float* scales) {
  float nothing = 0;
  rest.resize(static_cast<size_t>(count));
  for (int64_t first = 0; first < count; first += coding.group) {
    const int64_t last = std::min(first + coding.group, count);
    float highest = 0;
    float lowest = 0;
    for (int64_t i = first; i < last; ++i) {
      float number = numbers[i];
      if (columns.means) number -= columns.means[i];
      if (columns.factors) number /= columns.factors[i];
      nothing += number - number;
      rest[static_cast<size_t>(i)] = number;
      highest = std::max(highest, number);
      lowest = std::min(lowest, number);
    }
    *scales = scale_of(coding, highest, lowest);
    round_group(coding, rest.data() + first, last - first, *scales++, codes + first);
  }
  return nothing == 0;
}

}  // namespace softlookup
