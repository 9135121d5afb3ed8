// Attention of a few tokens over the committed cache and the round's window, for CPUs: a custom
// call of XLA, in float32. A cache may store its entries in bfloat16, or as 8-bit integers times a
// power of two for each token of a head.
//
// Keys and values are read in place, page by page: a cache without pages has one page for each row,
// of its whole capacity. A page holds whole blocks of keys, or there is only one. The softmax is
// accumulated over blocks of keys (Milakov and Gimelshein 2018, arXiv:1805.02867), for each query
// by itself: those that it sees in the window follow the committed ones, in the same blocks. So the
// bits of its result depend neither on how many tokens there are, nor on which of its keys are
// committed yet. Beside the mixed values, a query gets the logarithm of the softmax's denominator.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "common.h"

namespace {

constexpr int64_t kBlock = 64;  // keys
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr int64_t kLargeWork = 1 << 17;  // multiplications worth a second thread

// exp(x) for x <= 0, with a relative error of about 1e-7; 0 below -87.
template <typename Lanes>
inline typename Lanes::Vector exponential(typename Lanes::Vector x) {
  using Vector = typename Lanes::Vector;
  using Integers = typename Lanes::Integers;
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vector clamped = x < -87.0f ? Vector{} - 87.0f : x;
  const Vector shifted = Lanes::multiply_add(clamped, Vector{} + 1.44269504f, Vector{} + kShift);
  const Vector whole = shifted - kShift;
  Vector rest = Lanes::multiply_add(whole, Vector{} - 0.693359375f, clamped);
  rest = Lanes::multiply_add(whole, Vector{} + 2.12194440e-4f, rest);
  Vector series = Vector{} + 1.9875691500e-4f;
  for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                            1.6666665459e-1f, 5.0000001201e-1f})
    series = Lanes::multiply_add(series, rest, Vector{} + coefficient);
  series = Lanes::multiply_add(series * rest, rest, rest + 1.0f);
  const Integers exponent = (__builtin_convertvector(whole, Integers) + 127) << 23;
  return x < -87.0f ? Vector{} : series * (Vector)exponent;
}

// Keys or values of one head: a row of entries for each token, times its power of two if those are
// integers.
template <typename Entry>
struct Rows {
  const Entry* entries;
  const int8_t* exponents;
  int64_t width;

  Rows from(int64_t row) const {
    return {entries + row * width, exponents ? exponents + row : nullptr, width};
  }

  void prefetch(int64_t row) const {
    const auto* first = reinterpret_cast<const char*>(entries + row * width);
    const int64_t bytes = width * sizeof(Entry);
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(first + byte);
  }

  template <typename Lanes>
  typename Lanes::Vector load(int64_t row, int64_t i) const {
    using Vector = typename Lanes::Vector;
    const Entry* at = entries + row * width + i;
    if constexpr (sizeof(Entry) == 4) {
      return specjax::load<Lanes>(reinterpret_cast<const float*>(at));
    } else if constexpr (sizeof(Entry) == 2) {
      typename Lanes::Halves halves;
      std::memcpy(&halves, at, sizeof(halves));
      return (Vector)(__builtin_convertvector(halves, typename Lanes::Integers) << 16);
    } else {
      typename Lanes::Bytes bytes;
      std::memcpy(&bytes, at, sizeof(bytes));
      return __builtin_convertvector(bytes, Vector);
    }
  }

  float power(int64_t row) const {
    if constexpr (sizeof(Entry) > 1) return 1;
    const int32_t bits = (exponents[row] + 127) << 23;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
  }
};

template <typename Lanes, typename Entry>
inline float dot(const float* query, const Rows<Entry>& keys, int64_t row) {
  typename Lanes::Vector total = {};
  for (int64_t i = 0; i < keys.width; i += Lanes::kLanes)
    total = Lanes::multiply_add(specjax::load<Lanes>(query + i), keys.template load<Lanes>(row, i),
                                total);
  return Lanes::sum(total) * keys.power(row);
}

// Adds weights[0..count) times the rows of values to `total`, from column `column` on.
template <typename Lanes, int kVectors, typename Entry>
inline void add_weighted(const float* weights, const Rows<Entry>& values, int64_t count,
                         int64_t column, float* total) {
  typename Lanes::Vector sums[kVectors];
  for (int v = 0; v < kVectors; v++) sums[v] = specjax::load<Lanes>(total + v * Lanes::kLanes);
  for (int64_t row = 0; row < count; row++) {
    const auto weight = typename Lanes::Vector{} + weights[row] * values.power(row);
    for (int v = 0; v < kVectors; v++)
      sums[v] = Lanes::multiply_add(
          weight, values.template load<Lanes>(row, column + v * Lanes::kLanes), sums[v]);
  }
  for (int v = 0; v < kVectors; v++) specjax::store<Lanes>(total + v * Lanes::kLanes, sums[v]);
}

// Adds weights[0..count) times the rows of values to all columns of `total`.
template <typename Lanes, typename Entry>
inline void add_rows(const float* weights, const Rows<Entry>& values, int64_t count, float* total) {
  constexpr int kColumns = 64, kVectors = kColumns / Lanes::kLanes;
  int64_t i = 0;
  for (; i + kColumns <= values.width; i += kColumns)
    add_weighted<Lanes, kVectors>(weights, values, count, i, total + i);
  for (; i < values.width; i += Lanes::kLanes)
    add_weighted<Lanes, 1>(weights, values, count, i, total + i);
}

// One query's softmax so far: its peak and denominator, and `total`, the weighted sum of values.
template <typename Lanes>
struct Softmax {
  const float* query;
  float* total;
  float peak = kNothing, denominator = 0;

  // Turns a block of scores into weights and scales `total` to them; false if there are none.
  bool add(float* scores, int64_t width) {
    using Vector = typename Lanes::Vector;
    Vector peaks = specjax::load<Lanes>(scores);
    for (int64_t key = Lanes::kLanes; key < kBlock; key += Lanes::kLanes) {
      const Vector others = specjax::load<Lanes>(scores + key);
      peaks = peaks > others ? peaks : others;
    }
    float largest = peaks[0];
    for (int lane = 1; lane < Lanes::kLanes; lane++) largest = std::max(largest, peaks[lane]);
    if (largest == kNothing) return false;
    const float higher = std::max(peak, largest), scale = std::exp(peak - higher);
    for (int64_t i = 0; i < width; i += Lanes::kLanes)
      specjax::store<Lanes>(total + i, specjax::load<Lanes>(total + i) * scale);
    Vector weights = {};
    for (int64_t key = 0; key < kBlock; key += Lanes::kLanes) {
      const Vector weight = exponential<Lanes>(specjax::load<Lanes>(scores + key) - higher);
      specjax::store<Lanes>(scores + key, weight);
      weights += weight;
    }
    peak = higher;
    denominator = denominator * scale + Lanes::sum(weights);
    return true;
  }

  void divide(int64_t width) {
    const auto divisor = typename Lanes::Vector{} + denominator;
    for (int64_t i = 0; i < width; i += Lanes::kLanes)
      specjax::store<Lanes>(total + i, specjax::load<Lanes>(total + i) / divisor);
  }
};

template <typename Entry>
struct Operands {
  const float* queries;
  Rows<Entry> keys, values;
  Rows<float> window_keys, window_values;
  const int32_t *pages, *lengths, *oldest;
  const bool* seen;
  float *out, *scores;
  int64_t num_heads, num_queries, width, row_pages, page, slots, sinks;
  float softcap;
};

// The queries of one row `row` that share one key head `head` (an index over rows and heads).
template <typename Lanes, typename Entry>
void attend_head(const Operands<Entry>& all, int64_t row, int64_t head) {
  const int64_t width = all.width, committed = all.lengths[row];
  // The keys or values of a block of committed tokens.
  const auto block_of = [&](const Rows<Entry>& entries, int64_t block) {
    const int64_t page = all.pages[row * all.row_pages + block / all.page];
    const int64_t page_head = page * all.num_heads + head % all.num_heads;
    return entries.from(page_head * all.page + block % all.page);
  };
  const Rows<float> window_keys = all.window_keys.from(head * all.slots);
  const Rows<float> window_values = all.window_values.from(head * all.slots);
  const auto limited = [&](float value) {
    return all.softcap > 0 ? all.softcap * std::tanh(value / all.softcap) : value;
  };
  const auto oldest_of = [&](int64_t query) {
    return std::max<int64_t>(0, all.oldest[row * all.num_queries + query]);
  };
  alignas(64) float scores[kBlock];
  const auto clear = [&] { std::fill(scores, scores + kBlock, kNothing); };
  // Fetches the block `next` meanwhile, unless it is `block`: processors foresee no jump to another
  // page. Fetching a whole block at once would take longer than waiting for it.
  const auto score = [&](const Softmax<Lanes>& softmax, int64_t block, int64_t first, int64_t last,
                         int64_t next) {
    if (last <= first) return;
    const Rows<Entry> keys = block_of(all.keys, block);
    const Rows<Entry> next_keys = block_of(all.keys, next);
    const Rows<Entry> next_values = block_of(all.values, next);
    for (int64_t key = first; key < last; key++) {
      scores[key] = limited(dot<Lanes>(softmax.query, keys, key));
      if (next == block) continue;
      next_keys.prefetch(key);
      next_values.prefetch(key);
    }
  };
  const auto add_values = [&](const Softmax<Lanes>& softmax, int64_t block, int64_t first,
                              int64_t last) {
    if (last <= first) return;
    const Rows<Entry> values = block_of(all.values, block).from(first);
    add_rows<Lanes>(scores + first, values, last - first, softmax.total);
  };
  const auto add_committed = [&](Softmax<Lanes>& softmax, int64_t block, int64_t first,
                                 int64_t last, int64_t next) {
    clear();
    score(softmax, block, first, last, next);
    if (softmax.add(scores, width)) add_values(softmax, block, first, last);
  };

  std::vector<Softmax<Lanes>> softmaxes;
  for (int64_t query = 0; query < all.num_queries; query++) {
    const int64_t offset = (head * all.num_queries + query) * width;
    std::fill(all.out + offset, all.out + offset + width, 0.0f);
    softmaxes.push_back({all.queries + offset, all.out + offset});
    const int64_t sinks = std::min({all.sinks, oldest_of(query), committed});
    for (int64_t block = 0; block < sinks; block += kBlock)
      add_committed(softmaxes.back(), block, 0, std::min(kBlock, sinks - block), block);
  }
  // Each whole block of committed keys for all queries, so that memory is read once.
  const int64_t whole = committed / kBlock * kBlock;
  for (int64_t block = 0; block < whole; block += kBlock) {
    int64_t next = std::min(block + kBlock, whole - kBlock);
    for (int64_t query = 0; query < all.num_queries; query++) {
      const int64_t first = std::max<int64_t>(0, oldest_of(query) - block);
      if (first >= kBlock) continue;
      add_committed(softmaxes[query], block, first, kBlock, next);
      next = block;
    }
  }
  // The rest of the committed keys, and those of the window after them.
  for (int64_t query = 0; query < all.num_queries; query++) {
    Softmax<Lanes>& softmax = softmaxes[query];
    const int64_t oldest = oldest_of(query);
    const int64_t block = std::max(whole, oldest / kBlock * kBlock);
    int64_t first = 0, last = 0;       // committed keys of the block
    int64_t slots[kBlock], count = 0;  // of the window, after these
    const auto finish_block = [&] {
      if (softmax.add(scores, width)) {
        add_values(softmax, block, first, last);
        for (int64_t i = 0; i < count; i++)
          add_rows<Lanes>(scores + last + i, window_values.from(slots[i]), 1, softmax.total);
      }
      clear();
      first = last = count = 0;
    };
    clear();
    if (block < committed) {
      first = std::max<int64_t>(0, oldest - block);
      last = std::max(first, committed - block);
      score(softmax, block, first, last, block);
    }
    const bool* seen = all.seen + (row * all.num_queries + query) * all.slots;
    for (int64_t slot = 0; slot < all.slots; slot++) {
      if (!seen[slot]) continue;
      scores[last + count] = limited(dot<Lanes>(softmax.query, window_keys, slot));
      slots[count++] = slot;
      if (last + count == kBlock) finish_block();
    }
    finish_block();
    softmax.divide(width);
    all.scores[head * all.num_queries + query] = softmax.peak + std::log(softmax.denominator);
  }
}

template <typename Entry>
void attend(ffi::ThreadPool& pool, const Operands<Entry>& all, int64_t rows, int64_t heads) {
  int64_t work = 0;
  for (int64_t row = 0; row < rows; row++)
    work += heads * all.num_queries * all.width * (all.lengths[row] + all.slots);
  const auto one_head = [all, heads](int64_t head) {
    if (all.width % specjax::Widest::kLanes == 0)
      attend_head<specjax::Widest>(all, head / heads, head);
    else
      attend_head<specjax::Eight>(all, head / heads, head);
  };
  if (work < kLargeWork) {
    for (int64_t head = 0; head < rows * heads; head++) one_head(head);
  } else {
    specjax::in_parallel(pool, rows * heads, one_head);
  }
}

// `exponents` are those of keys and of values, if these are integers.
ffi::Error attention(ffi::ThreadPool pool, float softcap, int32_t sinks,
                     ffi::Buffer<ffi::F32> queries, ffi::Buffer<ffi::S32> layer,
                     ffi::AnyBuffer keys, ffi::AnyBuffer values,
                     ffi::Buffer<ffi::S32> pages, ffi::Buffer<ffi::S32> lengths,
                     ffi::Buffer<ffi::F32> window_keys, ffi::Buffer<ffi::F32> window_values,
                     ffi::Buffer<ffi::PRED> seen, ffi::Buffer<ffi::S32> oldest,
                     ffi::RemainingArgs exponents,
                     ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> scores) {
  const auto shape = queries.dimensions();  // [B, G, X, C]
  const int64_t rows = shape[0], heads = shape[1], width = shape[3];
  const int64_t num_pages = keys.dimensions()[1], page = keys.dimensions()[3];
  const int64_t index = layer.typed_data()[0], slots = window_keys.dimensions()[3];
  const auto run = [&](auto entry) {
    using Entry = decltype(entry);
    const auto stored = [&](const ffi::AnyBuffer& entries, size_t number) {
      const auto powers = exponents.get<ffi::Buffer<ffi::S8>>(number);
      const int8_t* first = powers ? powers->typed_data() : nullptr;
      const Rows<Entry> all{static_cast<const Entry*>(entries.untyped_data()), first, width};
      return all.from(index * num_pages * heads * page);
    };
    const auto windowed = [&](const float* entries) {
      return Rows<float>{entries, nullptr, width}.from(index * rows * heads * slots);
    };
    attend(pool,
           Operands<Entry>{queries.typed_data(), stored(keys, 0), stored(values, 1),
                           windowed(window_keys.typed_data()), windowed(window_values.typed_data()),
                           pages.typed_data(), lengths.typed_data(), oldest.typed_data(),
                           seen.typed_data(), out->typed_data(), scores->typed_data(), heads,
                           shape[2], width, pages.dimensions()[1], page, slots, sinks, softcap},
           rows, heads);
    return ffi::Error::Success();
  };
  switch (keys.element_type()) {
    case ffi::F32:
      return run(float{});
    case ffi::BF16:
      return run(uint16_t{});
    case ffi::S8:
      return run(int8_t{});
    default:
      return ffi::Error::InvalidArgument("keys are in another dtype");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("softcap")
                                  .Attr<int32_t>("sinks")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
