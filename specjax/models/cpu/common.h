// Vectors of eight or sixteen floats, and loops over several threads.

#ifndef SPECJAX_COMMON_H_
#define SPECJAX_COMMON_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define SPECJAX_AVX2 1
#endif
#if defined(__AVX512F__)
#define SPECJAX_AVX512 1
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace specjax {

// Eight floats, and what one instruction computes with them.
struct Eight {
  static constexpr int kLanes = 8, kRegisters = 16;
  typedef float Vector __attribute__((vector_size(32)));
  typedef float Unaligned __attribute__((vector_size(32), aligned(4)));
  typedef int32_t Integers __attribute__((vector_size(32)));
  typedef uint16_t Halves __attribute__((vector_size(16)));
  typedef int8_t Bytes __attribute__((vector_size(8)));

  // a * b + c, rounded once.
  static Vector multiply_add(Vector a, Vector b, Vector c) {
#ifdef SPECJAX_AVX2
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int lane = 0; lane < kLanes; lane++) c[lane] = std::fma(a[lane], b[lane], c[lane]);
    return c;
#endif
  }

  static float sum(Vector v) {
#ifdef SPECJAX_AVX2
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v),
                                   _mm256_extractf128_ps((__m256)v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#endif
  }
};

#ifdef SPECJAX_AVX512
struct Sixteen {
  static constexpr int kLanes = 16, kRegisters = 32;
  typedef float Vector __attribute__((vector_size(64)));
  typedef float Unaligned __attribute__((vector_size(64), aligned(4)));
  typedef int32_t Integers __attribute__((vector_size(64)));
  typedef uint16_t Halves __attribute__((vector_size(32)));
  typedef int8_t Bytes __attribute__((vector_size(16)));

  static Vector multiply_add(Vector a, Vector b, Vector c) {
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  }

  static float sum(Vector v) {
    Eight::Vector halves[2];
    std::memcpy(halves, &v, sizeof(halves));
    return Eight::sum(halves[0] + halves[1]);
  }
};
using Widest = Sixteen;
#else
using Widest = Eight;
#endif

template <typename Lanes>
inline typename Lanes::Vector load(const float* from) {
  return *reinterpret_cast<const typename Lanes::Unaligned*>(from);
}

template <typename Lanes>
inline void store(float* to, typename Lanes::Vector value) {
  *reinterpret_cast<typename Lanes::Unaligned*>(to) = value;
}

// Runs work(0) ... work(count - 1) on the pool's threads and this one; returns when all are done.
template <typename Work>
void in_parallel(ffi::ThreadPool& pool, int64_t count, Work work) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  // A thread that starts late finds nothing left to do, and touches nothing but the progress.
  const auto run = [progress, count, work]() {
    for (int64_t index; (index = progress->next.fetch_add(1)) < count;) {
      work(index);
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t threads = std::min<int64_t>(pool.num_threads(), count);
  for (int64_t thread = 1; thread < threads; thread++) {
    auto other = run;
    pool.Schedule(std::move(other));
  }
  run();
  while (progress->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

}  // namespace specjax

#endif  // SPECJAX_COMMON_H_
