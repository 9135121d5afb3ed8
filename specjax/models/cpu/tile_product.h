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

constexpr int kHalf = kGroup / 2;

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

// The product with the blocks of rows from `first` to `last` of a kernel with `rows` rows; y is
// [T][stride], from the kernel's first row on.
using MultiplyBlocks = void (*)(const uint8_t* tiles, int64_t first, int64_t last, int64_t rows,
                                const Activations& x, float* y, int64_t stride);

// The function for the format kFormats[kIndex] and activations of so many digits. Each format is
// compiled by itself (`tile_product.cc`).
template <int kIndex>
MultiplyBlocks multiply_of(int planes);

}  // namespace specjax

#endif  // SPECJAX_TILE_PRODUCT_H_
