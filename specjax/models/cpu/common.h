// Vectors of eight floats, and loops over several threads.

#ifndef SPECJAX_COMMON_H_
#define SPECJAX_COMMON_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
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

constexpr int kLanes = 8;

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedVector __attribute__((vector_size(4 * kLanes), aligned(4)));

inline Vector load(const float* from) { return *reinterpret_cast<const UnalignedVector*>(from); }

inline void store(float* to, Vector value) { *reinterpret_cast<UnalignedVector*>(to) = value; }

// a * b + c, rounded once.
inline Vector multiply_add(Vector a, Vector b, Vector c) {
#ifdef SPECJAX_AVX2
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (int lane = 0; lane < kLanes; lane++) c[lane] = std::fma(a[lane], b[lane], c[lane]);
  return c;
#endif
}

inline float sum(Vector v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
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
