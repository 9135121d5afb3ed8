// Products of float32 activations with kernels of 4 or 8 bits, for CPUs: a custom call of XLA.
//
// A kernel has one row for each output: D integers in groups of 32, each group with a scale and, of
// four bits, a minimum. A weight is scale * integer + minimum, and sums are in float32. Each output
// is summed in the same order whatever the number of tokens, so that its bits do not depend on it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "common.h"

namespace {

using Lanes = specjax::Widest;
using Vector = Lanes::Vector;

constexpr int kLanes = Lanes::kLanes;
constexpr int kGroup = 32;
constexpr int kParts = kGroup / kLanes;
constexpr int kMostTokens = 8, kMostRows = 4;  // whose sums are in registers at a time

// How many rows of a kernel are read at a time for so many tokens, so that the sums fit into
// registers beside a group's weights.
constexpr int rows_for(int tokens) {
  int rows = kMostRows;
  while (rows > 1 && rows * tokens + kParts + 2 > Lanes::kRegisters) rows /= 2;
  return rows;
}

// A kernel's arrays from its first row on.
struct Kernel {
  const uint8_t* values;
  const float* scales;
  const float* minimums;  // of four bits only
  int64_t rows;
};

// Unpacks a group. Of four bits, byte i holds weight i in its low half and weight i + 16 above.
template <int kBits>
inline void unpack(const Kernel& kernel, int64_t group, Vector* weights) {
  const uint8_t* values = kernel.values + group * (kGroup * kBits / 8);
  const float scale = kernel.scales[group];
#ifdef SPECJAX_AVX512
  const __m512 scales = _mm512_set1_ps(scale);
  const __m128i* bytes = reinterpret_cast<const __m128i*>(values);
  const auto floats = [](__m128i integers) {
    return _mm512_cvtepi32_ps(kBits == 4 ? _mm512_cvtepu8_epi32(integers)
                                         : _mm512_cvtepi8_epi32(integers));
  };
  if constexpr (kBits == 4) {
    const __m512 minimum = _mm512_set1_ps(kernel.minimums[group]);
    const __m128i both = _mm_loadu_si128(bytes), mask = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(both, mask);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
    weights[0] = (Vector)_mm512_fmadd_ps(floats(low), scales, minimum);
    weights[1] = (Vector)_mm512_fmadd_ps(floats(high), scales, minimum);
  } else {
    weights[0] = (Vector)_mm512_mul_ps(floats(_mm_loadu_si128(bytes)), scales);
    weights[1] = (Vector)_mm512_mul_ps(floats(_mm_loadu_si128(bytes + 1)), scales);
  }
#elif defined(SPECJAX_AVX2)
  const __m256 scales = _mm256_set1_ps(scale);
  if constexpr (kBits == 4) {
    const __m256 minimum = _mm256_set1_ps(kernel.minimums[group]);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(bytes, mask);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    const __m128i parts[kParts] = {low, _mm_srli_si128(low, 8), high, _mm_srli_si128(high, 8)};
#pragma GCC unroll 4
    for (int part = 0; part < kParts; part++) {
      const __m256 integers = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(parts[part]));
      weights[part] = (Vector)_mm256_fmadd_ps(integers, scales, minimum);
    }
  } else {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; part++) {
      const __m128i bytes =
          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values + kLanes * part));
      const __m256 integers = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
      weights[part] = (Vector)_mm256_mul_ps(integers, scales);
    }
  }
#else
  for (int i = 0; i < kGroup; i++) {
    float weight;
    if constexpr (kBits == 4) {
      const int integer = i < kGroup / 2 ? values[i] & 15 : values[i - kGroup / 2] >> 4;
      weight = std::fma(integer, scale, kernel.minimums[group]);
    } else {
      weight = static_cast<int8_t>(values[i]) * scale;
    }
    weights[i / kLanes][i % kLanes] = weight;
  }
#endif
}

// kRows outputs of kTokens tokens, with weights unpacked in registers.
template <int kBits, int kTokens, int kRows>
inline void few_tokens(const Kernel& kernel, const float* x, int64_t width, int64_t row, float* y,
                       int64_t stride) {
  const int64_t groups = width / kGroup;
  Vector sums[kRows][kTokens] = {};
  for (int64_t group = 0; group < groups; group++) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      // Rows of 8 bits come from memory half as fast without it.
      __builtin_prefetch(kernel.values + ((row + r + kRows) * groups + group) * (kGroup * kBits / 8));
      Vector weights[kParts];
      unpack<kBits>(kernel, (row + r) * groups + group, weights);
#pragma GCC unroll 8
      for (int token = 0; token < kTokens; token++)
#pragma GCC unroll 4
        for (int part = 0; part < kParts; part++)
          sums[r][token] = Lanes::multiply_add(
              weights[part],
              specjax::load<Lanes>(x + token * width + group * kGroup + part * kLanes),
              sums[r][token]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int token = 0; token < kTokens; token++)
      y[token * stride + row + r] = Lanes::sum(sums[r][token]);
}

// All rows from `first` on, for tokens whose sums stay in registers.
template <int kBits, int kTokens>
void few_tokens_of_rows(const Kernel& kernel, const float* x, int64_t width, int64_t first,
                        int64_t last, float* y, int64_t stride) {
  constexpr int kRows = rows_for(kTokens);
  int64_t row = first;
  for (; row + kRows <= last; row += kRows)
    few_tokens<kBits, kTokens, kRows>(kernel, x, width, row, y, stride);
  for (; row < last; row++) few_tokens<kBits, kTokens, 1>(kernel, x, width, row, y, stride);
}

template <int kBits>
void some_rows(const Kernel& kernel, const float* x, int64_t tokens, int64_t width, int64_t first,
               int64_t last, float* y, int64_t stride) {
  if (tokens > kMostTokens) {
    // A few rows at a time, so that the second half finds them in the cache.
    const int64_t half = tokens / 2;
    for (int64_t row = first; row < last; row += kMostRows) {
      const int64_t end = std::min<int64_t>(last, row + kMostRows);
      some_rows<kBits>(kernel, x, half, width, row, end, y, stride);
      some_rows<kBits>(kernel, x + half * width, tokens - half, width, row, end,
                       y + half * stride, stride);
    }
    return;
  }
  switch (tokens) {
#define SPECJAX_FEW(count)                                                                   \
  case count:                                                                                \
    return few_tokens_of_rows<kBits, count>(kernel, x, width, first, last, y, stride);
    SPECJAX_FEW(1)
    SPECJAX_FEW(2)
    SPECJAX_FEW(3)
    SPECJAX_FEW(4)
    SPECJAX_FEW(5)
    SPECJAX_FEW(6)
    SPECJAX_FEW(7)
    SPECJAX_FEW(8)
#undef SPECJAX_FEW
    default:
      return;
  }
}

struct Piece {
  Kernel kernel;
  int64_t first, last, column;
};

ffi::Error product(ffi::ThreadPool pool, int32_t bits, ffi::Buffer<ffi::F32> x,
                   ffi::Buffer<ffi::S32> layer, ffi::RemainingArgs arrays,
                   ffi::ResultBuffer<ffi::F32> out) {
  const int64_t tokens = x.dimensions()[0], width = x.dimensions()[1];
  const int64_t index = layer.typed_data()[0];
  const int64_t groups = width / kGroup, stride = out->dimensions()[1];
  const size_t arrays_of_each = bits == 4 ? 3 : 2;
  // Small pieces, so that a thread that is interrupted delays the others little.
  const int64_t share = stride / (4 * std::max<int64_t>(1, pool.num_threads()));
  const int64_t step = std::min<int64_t>(1024, std::max<int64_t>(16, share / 16 * 16));
  auto pieces = std::make_shared<std::vector<Piece>>();
  int64_t column = 0;
  for (size_t at = 0; at < arrays.size(); at += arrays_of_each) {
    const auto values = arrays.get<ffi::AnyBuffer>(at);
    const auto scales = arrays.get<ffi::Buffer<ffi::F32>>(at + 1);
    if (!values || !scales) return ffi::Error::InvalidArgument("a kernel has other arrays");
    const int64_t rows = values->dimensions()[1], before = index * rows * groups;
    Kernel kernel{static_cast<const uint8_t*>(values->untyped_data()) + before * (kGroup * bits / 8),
                  scales->typed_data() + before, nullptr, rows};
    if (bits == 4) {
      const auto minimums = arrays.get<ffi::Buffer<ffi::F32>>(at + 2);
      if (!minimums) return ffi::Error::InvalidArgument("a kernel has no minimums");
      kernel.minimums = minimums->typed_data() + before;
    }
    for (int64_t first = 0; first < rows; first += step)
      pieces->push_back({kernel, first, std::min(rows, first + step), column});
    column += rows;
  }
  const float* in = x.typed_data();
  float* result = out->typed_data();
  specjax::in_parallel(pool, pieces->size(), [=](int64_t number) {
    const Piece& piece = (*pieces)[number];
    const auto function = bits == 4 ? some_rows<4> : some_rows<8>;
    function(piece.kernel, in, tokens, width, piece.first, piece.last, result + piece.column,
             stride);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_quantized_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int32_t>("bits")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>());
