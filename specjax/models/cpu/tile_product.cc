// Products with the tiles of one format, kFormats[SPECJAX_FORMAT].

#include "tile_product.h"

namespace specjax {
namespace {

// The tokens whose sums are in registers at a time, beside those of a group's integers.
constexpr int kMostTokens = kRegisters >= 32 ? 9 : 4;
constexpr int kMostTokensInFloats = kRegisters >= 32 ? 9 : 5;
constexpr int kMostSubs = 2;                           // of a group
constexpr int kPrefetched = 4096;                      // bytes

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
  constexpr int kBits = kFormat.table ? 8 : kFormat.bits;
  constexpr int kOffset = kFormat.offset - (kBits == 8 ? kWideOffset : 0);
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
          sum[plane] = dots<kBits, kBytesOfSub>(weights.bytes + sub * kBytesOfSub, of_sub);
          if constexpr (kOffset != 0) {
            int32_t of_half = digit_sums[(at * 2 + sub) * kPlanes + plane];
            if (kSubs == 1) of_half += digit_sums[(at * 2 + 1) * kPlanes + plane];
            sum[plane] = add(sum[plane], splat_int(-kOffset * of_half));
          }
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

// Adds the products of input `i` of a group with kTokens tokens, whose activations are D apart.
template <int kTokens>
inline void add_products(Floats weight, const float* x, int64_t width, int i, Floats* result) {
#pragma GCC unroll 9
  for (int t = 0; t < kTokens; t++)
    result[t] = multiply_add(weight, splat(x[t * width + i]), result[t]);
}

// As multiply_tokens, in floats: one input after the other.
template <int kIndex, int kTokens>
void multiply_tokens_in_floats(const uint8_t* tiles, const Activations& x, int64_t token,
                               float (*sums)[kTileRows]) {
  constexpr Format kFormat = kFormats[kIndex];
  const int64_t width = x.groups * kGroup;
  const float* in = x.floats + token * width;
  Floats result[kTokens];
  for (int t = 0; t < kTokens; t++) result[t] = splat(0);
  if constexpr (kFormat.scales == Scales::kNone) {
    for (int64_t i = 0; i < width; i++, tiles += 2 * kTileRows) {
      const Floats weight =
          kIndex == kHalfFloats ? from_halves(tiles) : from_brain_floats(tiles);
      if (i % kGroup == 0) __builtin_prefetch(tiles + kPrefetched);
      add_products<kTokens>(weight, in, width, i, result);
    }
  } else {
    for_groups<kIndex>(tiles, x.groups, [&](int64_t group, const Group& weights) {
      const float* of_group = in + group * kGroup;
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        const int sub = j * kFormat.subs() / 8;
        constexpr bool kSigned = kFormat.offset > 0;
        const Bytes bytes = kSigned ? subtract(weights.bytes[j], kFormat.offset) : weights.bytes[j];
        const auto add = [&](int k, Floats integer) {
          const Floats weight = kFormat.has_minimums()
                                    ? multiply_add(integer, weights.scales[sub], weights.minimums[sub])
                                    : multiply(integer, weights.scales[sub]);
          add_products<kTokens>(weight, of_group, width, 4 * j + k, result);
        };
        add(0, byte_as_float<0, kSigned>(bytes));
        add(1, byte_as_float<1, kSigned>(bytes));
        add(2, byte_as_float<2, kSigned>(bytes));
        add(3, byte_as_float<3, kSigned>(bytes));
      }
    });
  }
  for (int t = 0; t < kTokens; t++) store(sums[t], result[t]);
}

// Calls function(token, std::integral_constant<int, n>) for parts of n tokens each. How they are
// divided changes no bits.
template <int kMost, typename Function>
inline void in_parts(int64_t tokens, Function function) {
  for (int64_t token = 0; token < tokens;) {
    const int64_t left = tokens - token;
    const auto part = [&](auto count) {
      if (left < count || count > kMost || (count == 9 && left > 9)) return false;
      if constexpr (count <= kMost) function(token, count);
      token += count;
      return true;
    };
    part(std::integral_constant<int, 9>{}) || part(std::integral_constant<int, 8>{}) ||
        part(std::integral_constant<int, 5>{}) || part(std::integral_constant<int, 4>{}) ||
        part(std::integral_constant<int, 3>{}) || part(std::integral_constant<int, 2>{}) ||
        part(std::integral_constant<int, 1>{});
  }
}

template <int kIndex, int kPlanes>
void multiply_blocks(const uint8_t* tiles, int64_t first, int64_t last, int64_t rows,
                     const Activations& x, float* y, int64_t stride) {
  constexpr Format kFormat = kFormats[kIndex];
  const int64_t block_bytes = x.groups / kFormat.groups() * kFormat.tile_bytes();
  std::vector<float> all_sums(x.tokens * kTileRows);
  auto* sums = reinterpret_cast<float(*)[kTileRows]>(all_sums.data());
  for (int64_t block = first; block < last; block++) {
    const uint8_t* from = tiles + block * block_bytes;
    in_parts<kPlanes ? kMostTokens : kMostTokensInFloats>(x.tokens, [&](int64_t token, auto tokens) {
      constexpr int kTokens = decltype(tokens)::value;
      if constexpr (kPlanes > 0)
        multiply_tokens<kIndex, kTokens, kPlanes>(from, x, token, sums + token);
      else
        multiply_tokens_in_floats<kIndex, kTokens>(from, x, token, sums + token);
    });
    const int64_t lanes = std::min<int64_t>(kTileRows, rows - block * kTileRows);
    for (int64_t token = 0; token < x.tokens; token++)
      std::memcpy(y + token * stride + block * kTileRows, sums[token], lanes * sizeof(float));
  }
}

}  // namespace

template <int kIndex>
MultiplyBlocks multiply_of(int planes) {
  if (kFormats[kIndex].scales == Scales::kNone) return multiply_blocks<kIndex, 0>;
  switch (planes) {
    case 1: return multiply_blocks<kIndex, 1>;
    case 2: return multiply_blocks<kIndex, 2>;
    case 3: return multiply_blocks<kIndex, 3>;
    default: return multiply_blocks<kIndex, 0>;
  }
}

template MultiplyBlocks multiply_of<SPECJAX_FORMAT>(int);

}  // namespace specjax
