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

using specjax::kLanes;
using specjax::load;
using specjax::multiply_add;
using specjax::store;
using specjax::sum;
using specjax::Vector;

constexpr int kGroup = 32;
constexpr int kParts = kGroup / kLanes;
constexpr int64_t kMostInRegisters = 24;  // tokens; of more, weights are unpacked into memory

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
#ifdef SPECJAX_AVX2
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
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      // Rows of 8 bits come from memory half as fast without it.
      __builtin_prefetch(kernel.values + ((row + r + kRows) * groups + group) * (kGroup * kBits / 8));
      Vector weights[kParts];
      unpack<kBits>(kernel, (row + r) * groups + group, weights);
#pragma GCC unroll 8
      for (int token = 0; token < kTokens; token++)
#pragma GCC unroll 4
        for (int part = 0; part < kParts; part++)
          sums[r][token] = multiply_add(
              weights[part], load(x + token * width + group * kGroup + part * kLanes),
              sums[r][token]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int token = 0; token < kTokens; token++)
      y[token * stride + row + r] = sum(sums[r][token]);
}

// kRows outputs of kTokens tokens, with weights that lie unpacked in memory.
template <int kTokens, int kRows>
inline void unpacked_tile(const float* weights, const float* x, int64_t width, float* y,
                          int64_t stride) {
  Vector sums[kRows][kTokens] = {};
  for (int64_t i = 0; i < width; i += kLanes)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      const Vector weight = load(weights + r * width + i);
#pragma GCC unroll 4
      for (int token = 0; token < kTokens; token++)
        sums[r][token] = multiply_add(weight, load(x + token * width + i), sums[r][token]);
    }
  for (int r = 0; r < kRows; r++)
    for (int token = 0; token < kTokens; token++) y[token * stride + r] = sum(sums[r][token]);
}

template <int kBits, int kRows>
void many_tokens(const Kernel& kernel, const float* x, int64_t tokens, int64_t width, int64_t row,
                 float* y, int64_t stride) {
  static thread_local std::vector<float> weights;
  weights.resize(kRows * width);
  const int64_t groups = kRows * width / kGroup;
  for (int64_t group = 0; group < groups; group++) {
    Vector unpacked[kParts];
    unpack<kBits>(kernel, row * (width / kGroup) + group, unpacked);
    for (int part = 0; part < kParts; part++)
      store(weights.data() + group * kGroup + part * kLanes, unpacked[part]);
  }
  int64_t token = 0;
  for (; token + 3 <= tokens; token += 3)
    unpacked_tile<3, kRows>(weights.data(), x + token * width, width, y + token * stride + row,
                            stride);
  for (; token < tokens; token++)
    unpacked_tile<1, kRows>(weights.data(), x + token * width, width, y + token * stride + row,
                            stride);
}

template <int kBits, int kRows>
void tile(const Kernel& kernel, const float* x, int64_t tokens, int64_t width, int64_t row,
          float* y, int64_t stride) {
  // Few rows at a time for many tokens: the sums stay in registers.
  constexpr int kHalf = kRows > 1 ? kRows / 2 : 1, kOne = 1;
  const auto in_steps = [&](auto step, auto function) {
    for (int r = 0; r < kRows; r += step) function(row + r);
  };
  switch (tokens) {
#define SPECJAX_FEW(count, rows)                                                 \
  case count:                                                                    \
    return in_steps(rows, [&](int64_t first) {                                   \
      few_tokens<kBits, count, rows>(kernel, x, width, first, y, stride);        \
    });
    SPECJAX_FEW(1, kRows)
    SPECJAX_FEW(2, kRows)
    SPECJAX_FEW(3, kHalf)
    SPECJAX_FEW(4, kHalf)
    SPECJAX_FEW(5, kHalf)
    SPECJAX_FEW(6, kOne)
    SPECJAX_FEW(7, kOne)
    SPECJAX_FEW(8, kOne)
#undef SPECJAX_FEW
    default:
      break;
  }
  if (tokens > kMostInRegisters)
    return many_tokens<kBits, kRows>(kernel, x, tokens, width, row, y, stride);
  const int64_t half = tokens / 2;
  tile<kBits, kRows>(kernel, x, half, width, row, y, stride);
  tile<kBits, kRows>(kernel, x + half * width, tokens - half, width, row, y + half * stride, stride);
}

template <int kBits>
void some_rows(const Kernel& kernel, const float* x, int64_t tokens, int64_t width, int64_t first,
               int64_t last, float* y, int64_t stride) {
  int64_t row = first;
  for (; row + 4 <= last; row += 4) tile<kBits, 4>(kernel, x, tokens, width, row, y, stride);
  for (; row < last; row++) tile<kBits, 1>(kernel, x, tokens, width, row, y, stride);
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
