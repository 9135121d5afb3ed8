// Tiles from the blocks of GGUF files, and rows of weights from tiles (`tile_formats.h`).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>

#include "tile_formats.h"

namespace {

using specjax::Format;
using specjax::Scales;
using specjax::kFormats;
using specjax::kGroup;
using specjax::kTileRows;

// A block of one row: its integers, with the offset, and its scales as they are in a tile.
struct Block {
  uint16_t d, minimum;  // half precision
  uint8_t integers[256];
  int8_t scales[16];
  uint8_t minimums[16];
};

uint16_t half_at(const uint8_t* bytes) {
  uint16_t bits;
  std::memcpy(&bits, bytes, 2);
  return bits;
}

// Two halves of bytes are two groups of `size` inputs.
void read_nibbles(const uint8_t* bytes, int size, uint8_t* integers) {
  for (int i = 0; i < size; i++) {
    integers[i] = bytes[i] & 15;
    integers[size + i] = bytes[i] >> 4;
  }
}

// The scales and minimums of Q4_K and Q5_K: 6 bits each, in 12 bytes.
void read_six_bits(const uint8_t* packed, Block* block) {
  for (int i = 0; i < 4; i++) {
    block->scales[i] = packed[i] & 63;
    block->minimums[i] = packed[4 + i] & 63;
    block->scales[4 + i] = (packed[8 + i] & 15) | ((packed[i] >> 2) & 48);
    block->minimums[4 + i] = (packed[8 + i] >> 4) | ((packed[4 + i] >> 2) & 48);
  }
}

template <int kIndex>
void read_block(const uint8_t* bytes, Block* block) {
  constexpr std::string_view name = kFormats[kIndex].name;
  uint8_t* integers = block->integers;
  block->d = half_at(bytes);
  if constexpr (name == "Q4_0" || name == "IQ4_NL") {
    read_nibbles(bytes + 2, 16, integers);
  } else if constexpr (name == "Q4_1") {
    block->minimum = half_at(bytes + 2);
    read_nibbles(bytes + 4, 16, integers);
  } else if constexpr (name == "Q5_0" || name == "Q5_1") {
    const uint8_t* high = bytes + (name == "Q5_0" ? 2 : 4);
    if constexpr (name == "Q5_1") block->minimum = half_at(bytes + 2);
    read_nibbles(high + 4, 16, integers);
    for (int i = 0; i < kGroup; i++) integers[i] |= ((high[i / 8] >> (i % 8)) & 1) << 4;
  } else if constexpr (name == "Q8_0") {
    for (int i = 0; i < kGroup; i++) integers[i] = bytes[2 + i] ^ 128;
  } else if constexpr (name == "Q2_K") {
    for (int i = 0; i < 16; i++) block->scales[i] = static_cast<int8_t>(bytes[i]);
    for (int group = 0; group < 8; group++)
      for (int i = 0; i < kGroup; i++)
        integers[32 * group + i] = (bytes[16 + group / 4 * 32 + i] >> (group % 4 * 2)) & 3;
    block->d = half_at(bytes + 80);
    block->minimum = half_at(bytes + 82);
  } else if constexpr (name == "Q3_K") {
    const uint8_t *high = bytes, *low = bytes + 32, *packed = bytes + 96;
    for (int group = 0; group < 8; group++)
      for (int i = 0; i < kGroup; i++)
        integers[32 * group + i] = ((low[group / 4 * 32 + i] >> (group % 4 * 2)) & 3) |
                                   ((high[i] >> group) & 1) << 2;
    for (int i = 0; i < 16; i++) {
      const int four = (packed[i % 8] >> (i / 8 * 4)) & 15;
      const int two = (packed[8 + i % 4] >> (i / 4 * 2)) & 3;
      block->scales[i] = static_cast<int8_t>((four | two << 4) - 32);
    }
    block->d = half_at(bytes + 108);
  } else if constexpr (name == "Q4_K" || name == "Q5_K") {
    block->minimum = half_at(bytes + 2);
    read_six_bits(bytes + 4, block);
    const uint8_t* low = bytes + (name == "Q4_K" ? 16 : 48);
    for (int i = 0; i < 4; i++) read_nibbles(low + 32 * i, 32, integers + 64 * i);
    if constexpr (name == "Q5_K")
      for (int group = 0; group < 8; group++)
        for (int i = 0; i < kGroup; i++)
          integers[32 * group + i] |= ((bytes[16 + i] >> group) & 1) << 4;
  } else if constexpr (name == "Q6_K") {
    const uint8_t *low = bytes, *high = bytes + 128;
    for (int group = 0; group < 8; group++)
      for (int i = 0; i < kGroup; i++)
        integers[32 * group + i] =
            ((low[group / 4 * 64 + group % 2 * 32 + i] >> (group % 4 / 2 * 4)) & 15) |
            ((high[group / 4 * 32 + i] >> (group % 4 * 2)) & 3) << 4;
    std::memcpy(block->scales, bytes + 192, 16);
    block->d = half_at(bytes + 208);
  } else if constexpr (name == "IQ4_XS") {
    const uint16_t high = half_at(bytes + 2);
    for (int i = 0; i < 8; i++) {
      const int low = (bytes[4 + i / 2] >> (i % 2 * 4)) & 15;
      block->scales[i] = static_cast<int8_t>((low | ((high >> (2 * i)) & 3) << 4) - 32);
      read_nibbles(bytes + 8 + 16 * i, 16, integers + 32 * i);
    }
  }
}

// The place of an integer's low bits: a byte of a group's integers, and the shift in it.
struct Place {
  int byte, shift;
};

inline Place place_of(int bits, int input, int row) {
  if (bits == 8) return {64 * (input / 4) + 4 * row + input % 4, 0};
  if (bits >= 4) return {64 * (input / 8) + 4 * row + input % 4, input / 4 % 2 * 4};
  return {64 * (input / 16) + 4 * row + input % 4, input / 4 % 4 * 2};
}

// The integers of four inputs, a byte each.
inline uint32_t four_at(const uint8_t* integers) {
  uint32_t word;
  std::memcpy(&word, integers, 4);
  return word;
}

// Writes a row of a tile, which was zero before.
template <int kIndex>
void write_row(const uint8_t* source, int row, uint8_t* tile) {
  constexpr Format format = kFormats[kIndex];
  if constexpr (format.scales == Scales::kNone) {
    for (int i = 0; i < kGroup; i++)
      std::memcpy(tile + 2 * (kTileRows * i + row), source + 2 * i, 2);
    return;
  }
  Block block;
  read_block<kIndex>(source, &block);
  std::memcpy(tile + 2 * row, &block.d, 2);
  if (format.has_minimums()) std::memcpy(tile + 2 * (kTileRows + row), &block.minimum, 2);
  constexpr int kLow = format.bits == 8 ? 8 : format.bits >= 4 ? 4 : 2;
  constexpr int kPerByte = 8 / kLow;
  constexpr uint32_t kMask = kLow == 8 ? ~0u : kLow == 4 ? 0x0f0f0f0fu : 0x03030303u;
  for (int group = 0; group < format.groups(); group++) {
    uint8_t* bytes = tile + format.super_bytes() + group * format.group_bytes();
    for (int sub = 0; format.scale_bytes() && sub < format.subs(); sub++) {
      bytes[kTileRows * sub + row] = block.scales[group * format.subs() + sub];
      if (format.scales == Scales::kBytesMinimum)
        bytes[kTileRows * (format.subs() + sub) + row] = block.minimums[group * format.subs() + sub];
    }
    bytes += format.scale_bytes();
    const uint8_t* integers = block.integers + kGroup * group;
    for (int j = 0; j < 8 / kPerByte; j++) {
      uint32_t word = 0;
      for (int k = 0; k < kPerByte; k++)
        word |= (four_at(integers + 4 * (kPerByte * j + k)) & kMask) << (kLow * k);
      std::memcpy(bytes + 64 * j + 4 * row, &word, 4);
    }
    uint8_t* planes = bytes + kTileRows * kGroup * kLow / 8;
    for (int plane = kLow; plane < format.bits; plane++, planes += 64)
      for (int j = 0; j < 8; j++) {
        // Byte k's bit becomes bit k.
        const uint32_t ones = (four_at(integers + 4 * j) >> plane) & 0x01010101u;
        const uint8_t nibble = ((ones * 0x01020408u) >> 24) & 15;
        planes[8 * j + row / 2] |= nibble << (row % 2 * 4);
      }
  }
}

float from_half(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, rest = half & 1023;
  float result;
  if (exponent == 0) {
    result = std::ldexp(static_cast<float>(rest), -24);
    return sign ? -result : result;
  }
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | rest << 13;
  std::memcpy(&result, &bits, 4);
  return result;
}

// The weights of one row of a tile.
void read_row(const Format& format, const uint8_t* tile, int row, float* weights) {
  if (format.scales == Scales::kNone) {
    for (int i = 0; i < kGroup; i++) {
      const uint16_t bits = half_at(tile + 2 * (kTileRows * i + row));
      const uint32_t wide = static_cast<uint32_t>(bits) << 16;
      if (&format == &kFormats[specjax::kHalfFloats]) weights[i] = from_half(bits);
      else std::memcpy(weights + i, &wide, 4);
    }
    return;
  }
  const float d = from_half(half_at(tile + 2 * row));
  const float m = format.has_minimums() ? from_half(half_at(tile + 2 * (kTileRows + row))) : 0;
  const int low_bits = format.bits == 8 ? 8 : format.bits >= 4 ? 4 : 2;
  for (int group = 0; group < format.groups(); group++) {
    const uint8_t* scales = tile + format.super_bytes() + group * format.group_bytes();
    const uint8_t* bytes = scales + format.scale_bytes();
    const uint8_t* planes = bytes + kTileRows * kGroup * low_bits / 8;
    for (int i = 0; i < kGroup; i++) {
      const int sub = i / format.sub;
      float scale = d, minimum = m;
      if (format.scales == Scales::kNibbles) {
        scale = d * (scales[kTileRows * sub + row] & 15);
        minimum = -m * (scales[kTileRows * sub + row] >> 4);
      } else if (format.scale_bytes()) {
        scale = d * static_cast<int8_t>(scales[kTileRows * sub + row]);
        if (format.scales == Scales::kBytesMinimum)
          minimum = -m * scales[kTileRows * (format.subs() + sub) + row];
      }
      const Place place = place_of(low_bits, i, row);
      int integer = (bytes[place.byte] >> place.shift) & ((1 << low_bits) - 1);
      const int bit = 4 * row + i % 4;
      for (int plane = low_bits; plane < format.bits; plane++)
        integer |= ((planes[64 * (plane - low_bits) + 8 * (i / 4) + bit / 8] >> (bit % 8)) & 1)
                   << plane;
      if (format.table) integer = specjax::kTable[integer];
      weights[kGroup * group + i] = std::fma(scale, integer - format.offset, minimum);
    }
  }
}

// Copies a row of a tile into one that was zero before.
void copy_row(const Format& format, const uint8_t* from, int from_row, uint8_t* to, int to_row) {
  const auto copy = [&](int64_t at, int bytes) {
    std::memcpy(to + at + bytes * to_row, from + at + bytes * from_row, bytes);
  };
  for (int at = 0; at < format.super_bytes(); at += 2 * kTileRows) copy(at, 2);
  const int low_bits = format.bits == 16 ? 16 : format.bits == 8 ? 8 : format.bits >= 4 ? 4 : 2;
  const int low_bytes = kTileRows * kGroup * low_bits / 8;
  for (int group = 0; group < format.groups(); group++) {
    int64_t at = format.super_bytes() + group * format.group_bytes();
    for (int sub = 0; sub < format.scale_bytes() / kTileRows; sub++, at += kTileRows) copy(at, 1);
    const int unit = low_bits == 16 ? 2 : 4;
    for (int j = 0; j < low_bytes / (unit * kTileRows); j++, at += unit * kTileRows) copy(at, unit);
    for (int j = 0; j < 8 * (format.bits - low_bits); j++, at += 8) {
      const int nibble = (from[at + from_row / 2] >> (from_row % 2 * 4)) & 15;
      to[at + to_row / 2] |= nibble << (to_row % 2 * 4);
    }
  }
}

// Where row `row` of a kernel begins.
template <typename Byte>
Byte* tile_of(const Format& format, Byte* tiles, int64_t row, int64_t width) {
  return tiles + row / kTileRows * (width / format.inputs) * format.tile_bytes();
}

// Whether a number in half precision is one, and not infinite.
inline bool is_finite(const uint8_t* half) { return (half_at(half) & 0x7c00) != 0x7c00; }

// Writes rows of blocks as those of a kernel, tile by tile. Returns whether all scales are finite.
template <int kIndex>
bool pack(const uint8_t* blocks, int64_t rows, int64_t width, int64_t first, uint8_t* tiles) {
  constexpr Format format = kFormats[kIndex];
  const int64_t row_bytes = width / format.inputs * format.block_bytes;
  bool finite = true;
  for (int64_t done = 0; done < rows;) {
    const int begin = (first + done) % kTileRows;
    const int count = static_cast<int>(std::min<int64_t>(kTileRows - begin, rows - done));
    uint8_t* tile = tile_of(format, tiles, first + done, width);
    const uint8_t* source = blocks + done * row_bytes;
    for (int64_t at = 0; at < width; at += format.inputs, tile += format.tile_bytes()) {
      for (int row = begin; row < begin + count; row++) {
        write_row<kIndex>(source + (row - begin) * row_bytes, row, tile);
        for (int at = 2 * row; at < format.super_bytes(); at += 2 * kTileRows)
          finite &= is_finite(tile + at);
      }
      source += format.block_bytes;
    }
    done += count;
  }
  return finite;
}

using Pack = bool (*)(const uint8_t*, int64_t, int64_t, int64_t, uint8_t*);

template <int... kIndices>
Pack pack_of(int format, std::integer_sequence<int, kIndices...>) {
  static constexpr Pack all[] = {pack<kIndices>...};
  return all[format];
}

}  // namespace

extern "C" {

const char* specjax_format_name(int format) { return kFormats[format].name; }

int specjax_format_inputs(int format) { return kFormats[format].inputs; }

int specjax_format_bits(int format) { return kFormats[format].bits; }

int64_t specjax_kernel_bytes(int format, int64_t rows, int64_t width) {
  return specjax::kernel_bytes(kFormats[format], rows, width);
}

// Writes `rows` rows of a file's blocks as rows `first`, ... of a kernel that was zero before. Two
// calls at a time must not write into the same 16 rows. Returns whether all scales are finite.
bool specjax_pack(int format, const uint8_t* blocks, int64_t rows, int64_t width, int64_t first,
                  uint8_t* tiles) {
  using Indices = std::make_integer_sequence<int, specjax::kNumFormats>;
  return pack_of(format, Indices{})(blocks, rows, width, first, tiles);
}

// Writes the rows `ids` of one kernel as rows 0, 1, ... of another one that was zero before. Rows
// with a negative id stay zero.
void specjax_take(int index, const uint8_t* tiles, int64_t width, const int32_t* ids, int64_t count,
                  uint8_t* into) {
  const Format& format = kFormats[index];
  for (int64_t row = 0; row < count; row++) {
    if (ids[row] < 0) continue;
    const uint8_t* from = tile_of(format, tiles, ids[row], width);
    uint8_t* to = tile_of(format, into, row, width);
    for (int64_t at = 0; at < width; at += format.inputs) {
      copy_row(format, from, ids[row] % kTileRows, to, row % kTileRows);
      from += format.tile_bytes();
      to += format.tile_bytes();
    }
  }
}

// Writes the weights of row `row` of a kernel.
void specjax_row(int index, const uint8_t* tiles, int64_t width, int64_t row, float* weights) {
  const Format& format = kFormats[index];
  const uint8_t* tile = tile_of(format, tiles, row, width);
  for (int64_t at = 0; at < width; at += format.inputs) {
    read_row(format, tile, row % kTileRows, weights + at);
    tile += format.tile_bytes();
  }
}

}  // extern "C"
