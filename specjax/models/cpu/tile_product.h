// Products of activations with the tiles of a kernel (`tile_formats.h`).
//
// Activations are integers of 8, 16 or 24 bits with a scale for each 32 inputs, as one, two or three
// signed bytes (digits to the base 256), or floats. The sum of a group's products of integers is
// exact; then groups are added up in floats, one after the other. So each output is computed in the
// same order whatever the number of tokens, and its bits depend neither on that nor on the
// processor.

#ifndef SPECJAX_TILE_PRODUCT_H_
#define SPECJAX_TILE_PRODUCT_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "lanes16.h"
#include "tile_formats.h"

namespace specjax {

constexpr int kMostTokens = kRegisters >= 32 ? 9 : 4;  // whose sums are in registers at a time
constexpr int kHalf = kGroup / 2;
constexpr int kMostSubs = 2;                           // of a group
constexpr int kPrefetched = 4096;                      // bytes

// Activations of T tokens and D = 32 G inputs.
struct Activations {
  int64_t tokens, groups;
  int planes;                   // digits, or 0 for floats
  const float* floats;          // [T][D]
  std::vector<int8_t> digits;   // [T][G][planes][32], the largest digit first
  std::vector<float> scales;    // [T][G]
  std::vector<int32_t> sums;    // [T][G][2][planes]: of the digits of each half of a group
  std::vector<float> totals;    // [T][G][2]: of the activations of each half

  Activations(const float* x, int64_t tokens, int64_t width, int planes)
      : tokens(tokens), groups(width / kGroup), planes(planes), floats(x) {
    const int64_t all = tokens * groups;
    digits.resize(all * planes * kGroup);
    scales.resize(planes ? all : 0);
    sums.resize(all * 2 * planes);
    totals.resize(planes ? 2 * all : 0);
    for (int64_t token = 0; token < tokens && planes; token++)
      for (int64_t group = 0; group < groups; group++) round(token, group);
  }

 private:
  // The largest integer: its digits are at most 127, also if it is rounded up a little.
  static float largest(int planes) { return planes == 1 ? 127 : planes == 2 ? 32639 : 8355700; }

  void round(int64_t token, int64_t group) {
    const int64_t at = token * groups + group;
    const float* x = floats + at * kGroup;
    uint32_t most = 0;  // of the magnitudes' bits, which are in the order of the magnitudes
    for (int i = 0; i < kGroup; i++) {
      uint32_t bits;
      std::memcpy(&bits, x + i, 4);
      most = std::max(most, bits & 0x7fffffffu);
    }
    float magnitude;
    std::memcpy(&magnitude, &most, 4);
    // What is no number makes the whole group none, and zeros stay zeros.
    const bool is_number = most < 0x7f800000u;
    float scale = is_number ? magnitude / largest(planes) : std::numeric_limits<float>::quiet_NaN();
    float inverse = scale > 0 ? 1 / scale : 0;
    if (inverse > std::numeric_limits<float>::max()) inverse = 0;  // of magnitudes below 1e-31
    if (is_number && inverse == 0) scale = 0;
    scales[at] = scale;
    int8_t* into = digits.data() + at * planes * kGroup;
    for (int half = 0; half < 2; half++) {
      // Zero where no number is: its product with the scale is none either.
      Ints rest = splat_int(0);
      if (inverse > 0)
        rest = to_nearest(multiply(load(x + kHalf * half), splat(inverse)));
      totals[2 * at + half] = scale * static_cast<float>(sum(rest));
      for (int plane = planes - 1; plane >= 0; plane--) {
        const Ints digit = plane ? low_digit(rest) : rest;
        store_digits(into + plane * kGroup + kHalf * half, digit);
        sums[(2 * at + half) * planes + plane] = sum(digit);
        rest = higher_digits(rest, digit);
      }
    }
  }
};

// A group of 16 rows: bytes as `dot` takes them, with the scales and minimums of its sub-groups.
struct Group {
  Bytes bytes[8];
  Floats scales[kMostSubs], minimums[kMostSubs];
};

template <int kIndex>
inline void unpack_integers(const uint8_t* from, Bytes* to) {
  constexpr Format kFormat = kFormats[kIndex];
  constexpr int kLow = kFormat.bits == 8 ? 8 : kFormat.bits >= 4 ? 4 : 2;
  if constexpr (kLow == 8) {
    for (int j = 0; j < 8; j++) to[j] = load_bytes(from + 64 * j);
  } else if constexpr (kLow == 4) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const Bytes both = load_bytes(from + 64 * j);
      to[2 * j] = field<0>(both, 15);
      to[2 * j + 1] = field<4>(both, 15);
    }
  } else {
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const Bytes all = load_bytes(from + 64 * j);
      to[4 * j] = field<0>(all, 3);
      to[4 * j + 1] = field<2>(all, 3);
      to[4 * j + 2] = field<4>(all, 3);
      to[4 * j + 3] = field<6>(all, 3);
    }
  }
  const uint8_t* planes = from + kTileRows * kGroup * kLow / 8;
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) {
    if constexpr (kFormat.bits > kLow) to[j] = add_where(to[j], planes + 8 * j, 1 << kLow);
    if constexpr (kFormat.bits > kLow + 1)
      to[j] = add_where(to[j], planes + 64 + 8 * j, 2 << kLow);
    if constexpr (kFormat.table) to[j] = look_up(kTable, to[j]);
  }
}

// Unpacks the group at `from`; d and m are the tile's numbers.
template <int kIndex>
inline void unpack(const uint8_t* from, Floats d, Floats minus_m, Group* to) {
  constexpr Format kFormat = kFormats[kIndex];
  constexpr int kSubs = kFormat.subs();
#pragma GCC unroll 2
  for (int sub = 0; sub < kSubs; sub++) {
    const uint8_t* scales = from + kTileRows * sub;
    if constexpr (kFormat.scales == Scales::kBytes) {
      to->scales[sub] = multiply(d, from_signed(scales));
    } else if constexpr (kFormat.scales == Scales::kBytesMinimum) {
      to->scales[sub] = multiply(d, from_unsigned(scales));
      to->minimums[sub] = multiply(minus_m, from_unsigned(scales + kTileRows * kSubs));
    } else if constexpr (kFormat.scales == Scales::kNibbles) {
      uint8_t low[kTileRows], high[kTileRows];
      for (int row = 0; row < kTileRows; row++) {
        low[row] = scales[row] & 15;
        high[row] = scales[row] >> 4;
      }
      to->scales[sub] = multiply(d, from_unsigned(low));
      to->minimums[sub] = multiply(minus_m, from_unsigned(high));
    } else {
      to->scales[sub] = d;
      to->minimums[sub] = minus_m;
    }
  }
  unpack_integers<kIndex>(from + kFormat.scale_bytes(), to->bytes);
}

// Calls function(group number, group) for each group of a block of rows.
template <int kIndex, typename Function>
inline void for_groups(const uint8_t* tile, int64_t groups, Function function) {
  constexpr Format kFormat = kFormats[kIndex];
  constexpr bool kNegative = kFormat.scales != Scales::kHalfMinimum;  // minimums are stored as -m
  for (int64_t first = 0; first < groups; first += kFormat.groups()) {
    const Floats d = from_halves(tile);
    Floats m = d;
    if constexpr (kFormat.has_minimums()) {
      m = from_halves(tile + 2 * kTileRows);
      if constexpr (kNegative) m = multiply(m, splat(-1));
    }
    const uint8_t* from = tile + kFormat.super_bytes();
#pragma GCC unroll 1
    for (int at = 0; at < kFormat.groups(); at++, from += kFormat.group_bytes()) {
      // Tiles further on, since rows of 16 are a stream that the processor does not foresee.
#pragma GCC unroll 10
      for (int byte = 0; byte < kFormat.group_bytes(); byte += 64)
        __builtin_prefetch(from + kPrefetched + byte);
      Group group;
      unpack<kIndex>(from, d, m, &group);
      function(first + at, group);
    }
    tile += kFormat.tile_bytes();
  }
}

// The products of a block of rows with kTokens tokens from `token` on: [kTokens][16] sums.
template <int kIndex, int kTokens, int kPlanes>
void multiply_tokens(const uint8_t* tiles, const Activations& x, int64_t token,
                     float (*sums)[kTileRows]) {
  constexpr Format kFormat = kFormats[kIndex];
  constexpr int kSubs = kFormat.subs(), kBytesOfSub = 8 / kSubs;
  constexpr bool kWide = kFormat.bits == 8 || kFormat.table;
  constexpr int kOffset = kFormat.offset - (kWide ? kWideOffset : 0);
  const int8_t* digits = x.digits.data() + token * x.groups * kPlanes * kGroup;
  const float* scales = x.scales.data() + token * x.groups;
  const float* totals = x.totals.data() + token * x.groups * 2;
  const int32_t* digit_sums = x.sums.data() + token * x.groups * 2 * kPlanes;
  Floats result[kTokens];
  for (int t = 0; t < kTokens; t++) result[t] = splat(0);
  for_groups<kIndex>(tiles, x.groups, [&](int64_t group, const Group& weights) {
#pragma GCC unroll 2
    for (int sub = 0; sub < kSubs; sub++) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; t++) {
        const int64_t at = t * x.groups + group;
        Ints sum[kPlanes];
#pragma GCC unroll 3
        for (int plane = 0; plane < kPlanes; plane++) {
          const int8_t* of_sub = digits + (at * kPlanes + plane) * kGroup + sub * 4 * kBytesOfSub;
          const auto four = [&](int j) {
            int32_t bytes;
            std::memcpy(&bytes, of_sub + 4 * j, 4);
            return bytes;
          };
          // Two sums, since each product waits for the one before it.
          Ints even = splat_int(0), odd = splat_int(0);
          if constexpr (kOffset != 0) {
            int32_t of_half = digit_sums[(at * 2 + sub) * kPlanes + plane];
            if (kSubs == 1) of_half += digit_sums[(at * 2 + 1) * kPlanes + plane];
            even = splat_int(-kOffset * of_half);
          }
#pragma GCC unroll 8
          for (int j = 0; j < kBytesOfSub; j += 2) {
            even = dot<kWide>(even, weights.bytes[sub * kBytesOfSub + j], four(j));
            odd = dot<kWide>(odd, weights.bytes[sub * kBytesOfSub + j + 1], four(j + 1));
          }
          sum[plane] = add(even, odd);
        }
        Floats product;
        if constexpr (kPlanes == 1) {
          product = to_floats(sum[0]);
        } else if constexpr (kPlanes == 2) {
          product = to_floats(add(times_256(sum[0]), sum[1]));
        } else {
          product = to_floats(add(times_256(sum[1]), sum[2]));
          product = multiply_add(to_floats(sum[0]), splat(65536), product);
        }
        const Floats scale = multiply(weights.scales[sub], splat(scales[at]));
        result[t] = multiply_add(product, scale, result[t]);
        if constexpr (kFormat.has_minimums()) {
          const float total = kSubs == 2 ? totals[2 * at + sub] : totals[2 * at] + totals[2 * at + 1];
          result[t] = multiply_add(weights.minimums[sub], splat(total), result[t]);
        }
      }
    }
  });
  for (int t = 0; t < kTokens; t++) store(sums[t], result[t]);
}

// The weights of a group as floats: [32][16].
template <int kIndex>
inline void to_floats(const Group& weights, float (*to)[kTileRows]) {
  constexpr Format kFormat = kFormats[kIndex];
  const Floats one = splat(1), offset = splat(-kFormat.offset);
  for (int j = 0; j < 8; j++) {
    const int sub = j * kFormat.subs() / 8;
    const Floats minimum = kFormat.has_minimums() ? weights.minimums[sub] : splat(0);
    const auto write = [&](int k, Floats integer) {
      const Floats signed_integer = multiply_add(integer, one, offset);
      store(to[4 * j + k], multiply_add(signed_integer, weights.scales[sub], minimum));
    };
    write(0, byte_as_float<0>(weights.bytes[j]));
    write(1, byte_as_float<1>(weights.bytes[j]));
    write(2, byte_as_float<2>(weights.bytes[j]));
    write(3, byte_as_float<3>(weights.bytes[j]));
  }
}

template <int kTokens>
void add_float_products(const float (*weights)[kTileRows], const Activations& x, int64_t token,
                        int64_t group, float (*sums)[kTileRows]) {
  const int64_t width = x.groups * kGroup;
  const float* in = x.floats + token * width + group * kGroup;
  Floats totals[kTokens];
  for (int t = 0; t < kTokens; t++) totals[t] = load(sums[t]);
  for (int i = 0; i < kGroup; i++) {
    const Floats weight = load(weights[i]);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++)
      totals[t] = multiply_add(weight, splat(in[t * width + i]), totals[t]);
  }
  for (int t = 0; t < kTokens; t++) store(sums[t], totals[t]);
}

// Calls function(token, std::integral_constant<int, n>) for parts of n tokens each. How they are
// divided changes no bits.
template <typename Function>
inline void in_parts(int64_t tokens, Function function) {
  for (int64_t token = 0; token < tokens;) {
    const int64_t left = tokens - token;
    const auto part = [&](auto count) {
      if (left < count || count > kMostTokens || (count == 9 && left > 9)) return false;
      if constexpr (count <= kMostTokens) function(token, count);
      token += count;
      return true;
    };
    part(std::integral_constant<int, 9>{}) || part(std::integral_constant<int, 8>{}) ||
        part(std::integral_constant<int, 5>{}) || part(std::integral_constant<int, 4>{}) ||
        part(std::integral_constant<int, 3>{}) || part(std::integral_constant<int, 2>{}) ||
        part(std::integral_constant<int, 1>{});
  }
}

// The product with blocks of rows from `first` to `last`; y is [T][stride], from the first row on.
template <int kIndex, int kPlanes>
void multiply_blocks(const uint8_t* tiles, int64_t first, int64_t last, int64_t rows,
                     const Activations& x, float* y, int64_t stride) {
  constexpr Format kFormat = kFormats[kIndex];
  constexpr bool kFloats = kFormat.scales == Scales::kNone;
  const int64_t block_bytes = x.groups / kFormat.groups() * kFormat.tile_bytes();
  std::vector<float> all_sums(x.tokens * kTileRows);
  auto* sums = reinterpret_cast<float(*)[kTileRows]>(all_sums.data());
  for (int64_t block = first; block < last; block++) {
    const uint8_t* from = tiles + block * block_bytes;
    if constexpr (kPlanes > 0 && !kFloats) {
      in_parts(x.tokens, [&](int64_t token, auto tokens) {
        multiply_tokens<kIndex, decltype(tokens)::value, kPlanes>(from, x, token, sums + token);
      });
    } else {
      alignas(64) float floats[kGroup][kTileRows];
      std::fill(all_sums.begin(), all_sums.end(), 0.0f);
      const auto add = [&](int64_t group) {
        in_parts(x.tokens, [&](int64_t token, auto tokens) {
          add_float_products<decltype(tokens)::value>(floats, x, token, group, sums + token);
        });
      };
      if constexpr (kFloats) {
        for (int64_t group = 0; group < x.groups; group++, from += kFormat.tile_bytes()) {
          for (int i = 0; i < kGroup; i++)
            store(floats[i], kIndex == kHalfFloats ? from_halves(from + 2 * kTileRows * i)
                                                   : from_brain_floats(from + 2 * kTileRows * i));
          add(group);
        }
      } else {
        for_groups<kIndex>(from, x.groups, [&](int64_t group, const Group& weights) {
          to_floats<kIndex>(weights, floats);
          add(group);
        });
      }
    }
    const int64_t lanes = std::min<int64_t>(kTileRows, rows - block * kTileRows);
    for (int64_t token = 0; token < x.tokens; token++)
      std::memcpy(y + token * stride + block * kTileRows, sums[token], lanes * sizeof(float));
  }
}

using MultiplyBlocks = void (*)(const uint8_t*, int64_t, int64_t, int64_t, const Activations&,
                                float*, int64_t);

template <int kPlanes, int... kIndices>
MultiplyBlocks multiply_of(int index, std::integer_sequence<int, kIndices...>) {
  constexpr MultiplyBlocks all[] = {multiply_blocks<kIndices, kPlanes>...};
  return all[index];
}

// The function for a format and activations of so many digits.
inline MultiplyBlocks multiply_of(int format, int planes) {
  using Indices = std::make_integer_sequence<int, kNumFormats>;
  switch (planes) {
    case 1: return multiply_of<1>(format, Indices{});
    case 2: return multiply_of<2>(format, Indices{});
    case 3: return multiply_of<3>(format, Indices{});
    default: return multiply_of<0>(format, Indices{});
  }
}

}  // namespace specjax

#endif  // SPECJAX_TILE_PRODUCT_H_
