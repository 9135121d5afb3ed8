// Attention of a few tokens over the committed cache and the round's window, for CPUs: a custom
// call of XLA, in float32.
//
// Keys and values are read in place. The softmax is accumulated over blocks of keys (Milakov and
// Gimelshein 2018, arXiv:1805.02867), for each query by itself, so that the bits of its result do
// not depend on how many tokens there are.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common.h"

namespace {

using specjax::kLanes;
using specjax::load;
using specjax::multiply_add;
using specjax::store;
using specjax::sum;
using specjax::Vector;

typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

constexpr int64_t kBlock = 64;  // keys
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr int64_t kLargeWork = 1 << 17;  // multiplications worth a second thread

// exp(x) for x <= 0, with a relative error of about 1e-7; 0 below -87.
inline Vector exponential(Vector x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vector clamped = x < -87.0f ? Vector{} - 87.0f : x;
  const Vector shifted = multiply_add(clamped, Vector{} + 1.44269504f, Vector{} + kShift);
  const Vector whole = shifted - kShift;
  Vector rest = multiply_add(whole, Vector{} - 0.693359375f, clamped);
  rest = multiply_add(whole, Vector{} + 2.12194440e-4f, rest);
  Vector series = Vector{} + 1.9875691500e-4f;
  for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                            1.6666665459e-1f, 5.0000001201e-1f})
    series = multiply_add(series, rest, Vector{} + coefficient);
  series = multiply_add(series * rest, rest, rest + 1.0f);
  const Integers exponent = (__builtin_convertvector(whole, Integers) + 127) << 23;
  return x < -87.0f ? Vector{} : series * (Vector)exponent;
}

inline float dot(const float* a, const float* b, int64_t width) {
  Vector total = {};
  for (int64_t i = 0; i < width; i += kLanes) total = multiply_add(load(a + i), load(b + i), total);
  return sum(total);
}

// One query's softmax so far.
struct Softmax {
  float peak = kNothing, denominator = 0;
};

// Adds weights[0..count) times the rows of values to `total`.
template <int kVectors>
inline void add_weighted(const float* weights, const float* values, int64_t count, int64_t width,
                         float* total) {
  Vector sums[kVectors];
  for (int v = 0; v < kVectors; v++) sums[v] = load(total + v * kLanes);
  for (int64_t key = 0; key < count; key++) {
    const Vector weight = Vector{} + weights[key];
    for (int v = 0; v < kVectors; v++)
      sums[v] = multiply_add(weight, load(values + key * width + v * kLanes), sums[v]);
  }
  for (int v = 0; v < kVectors; v++) store(total + v * kLanes, sums[v]);
}

// Adds keys [first, last) of a block to a query's softmax; `scores` has room for a block, and -inf
// outside of them.
inline void add_block(float* scores, const float* values, int64_t first, int64_t last,
                      int64_t width, Softmax& softmax, float* total) {
  const float largest = *std::max_element(scores + first, scores + last);
  if (largest == kNothing) return;
  const float peak = std::max(softmax.peak, largest);
  const float scale = std::exp(softmax.peak - peak);
  for (int64_t i = 0; i < width; i += kLanes) store(total + i, load(total + i) * scale);
  Vector weights = {};
  for (int64_t key = 0; key < kBlock; key += kLanes) {
    const Vector weight = exponential(load(scores + key) - peak);
    store(scores + key, weight);
    weights += weight;
  }
  softmax = {peak, softmax.denominator * scale + sum(weights)};
  const float* own = values + first * width;
  int64_t i = 0;
  for (; i + 8 * kLanes <= width; i += 8 * kLanes)
    add_weighted<8>(scores + first, own + i, last - first, width, total + i);
  for (; i < width; i += kLanes)
    add_weighted<1>(scores + first, own + i, last - first, width, total + i);
}

struct Operands {
  const float *queries, *keys, *values, *window_keys, *window_values;
  const int32_t *lengths, *oldest;
  const bool* seen;
  float* out;
  int64_t num_queries, width, capacity, slots;
  float softcap;
};

// The queries of one row `row` that share one key head `head` (an index over rows and heads).
void attend_head(const Operands& all, int64_t row, int64_t head) {
  const int64_t width = all.width;
  const float* keys = all.keys + head * all.capacity * width;
  const float* values = all.values + head * all.capacity * width;
  const float* window_keys = all.window_keys + head * all.slots * width;
  const float* window_values = all.window_values + head * all.slots * width;
  for (int64_t query = 0; query < all.num_queries; query++) {
    const float* q = all.queries + (head * all.num_queries + query) * width;
    float* total = all.out + (head * all.num_queries + query) * width;
    std::fill(total, total + width, 0.0f);
    Softmax softmax;
    alignas(32) float scores[kBlock];
    const auto score = [&](const float* key) {
      const float value = dot(q, key, width);
      return all.softcap > 0 ? all.softcap * std::tanh(value / all.softcap) : value;
    };
    const int64_t committed = all.lengths[row];
    const int64_t oldest = std::max<int32_t>(0, all.oldest[row * all.num_queries + query]);
    for (int64_t block = oldest / kBlock * kBlock; block < committed; block += kBlock) {
      const int64_t first = std::max<int64_t>(0, oldest - block);
      const int64_t last = std::min(kBlock, committed - block);
      if (first >= last) continue;
      std::fill(scores, scores + kBlock, kNothing);
      for (int64_t key = first; key < last; key++) scores[key] = score(keys + (block + key) * width);
      add_block(scores, values + block * width, first, last, width, softmax, total);
    }
    const bool* seen = all.seen + (row * all.num_queries + query) * all.slots;
    for (int64_t block = 0; block < all.slots; block += kBlock) {
      const int64_t last = std::min(kBlock, all.slots - block);
      std::fill(scores, scores + kBlock, kNothing);
      for (int64_t key = 0; key < last; key++)
        if (seen[block + key]) scores[key] = score(window_keys + (block + key) * width);
      add_block(scores, window_values + block * width, 0, last, width, softmax, total);
    }
    const Vector denominator = Vector{} + softmax.denominator;
    for (int64_t i = 0; i < width; i += kLanes) store(total + i, load(total + i) / denominator);
  }
}

ffi::Error attention(ffi::ThreadPool pool, float softcap, ffi::Buffer<ffi::F32> queries,
                     ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::F32> keys,
                     ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::S32> lengths,
                     ffi::Buffer<ffi::F32> window_keys, ffi::Buffer<ffi::F32> window_values,
                     ffi::Buffer<ffi::PRED> seen, ffi::Buffer<ffi::S32> oldest,
                     ffi::ResultBuffer<ffi::F32> out) {
  const auto shape = queries.dimensions();  // [B, G, X, C]
  const int64_t rows = shape[0], heads = shape[1], width = shape[3];
  const int64_t capacity = keys.dimensions()[3], slots = window_keys.dimensions()[3];
  const int64_t index = layer.typed_data()[0];
  const int64_t cached = index * rows * heads * capacity * width;
  const int64_t windowed = index * rows * heads * slots * width;
  const Operands all{queries.typed_data(),
                     keys.typed_data() + cached,
                     values.typed_data() + cached,
                     window_keys.typed_data() + windowed,
                     window_values.typed_data() + windowed,
                     lengths.typed_data(),
                     oldest.typed_data(),
                     seen.typed_data(),
                     out->typed_data(),
                     shape[2],
                     width,
                     capacity,
                     slots,
                     softcap};
  int64_t work = 0;
  for (int64_t row = 0; row < rows; row++)
    work += heads * shape[2] * width * (lengths.typed_data()[row] + slots);
  const auto one_head = [all, heads](int64_t head) { attend_head(all, head / heads, head); };
  if (work < kLargeWork) {
    for (int64_t head = 0; head < rows * heads; head++) one_head(head);
  } else {
    specjax::in_parallel(pool, rows * heads, one_head);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("softcap")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
