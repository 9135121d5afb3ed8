// RMS and layer norms of a few tokens in float32, for CPUs: a custom call of XLA. Each row is summed
// in one order however many there are, so that its bits do not depend on it.

#include <cmath>
#include <cstdint>

#include "common.h"

namespace {

using Lanes = specjax::Eight;
using Vector = Lanes::Vector;

constexpr int kLanes = Lanes::kLanes;

// The sum over a row of (x - middle), or of its square.
template <bool kSquared>
float sum_over(const float* x, float middle, int64_t width) {
  Vector total = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vector rest = specjax::load<Lanes>(x + i) - middle;
    total = kSquared ? Lanes::multiply_add(rest, rest, total) : total + rest;
  }
  float result = Lanes::sum(total);
  for (; i < width; i++) {
    const float rest = x[i] - middle;
    result += kSquared ? rest * rest : rest;
  }
  return result;
}

// With a bias a layer norm, without one an RMS norm.
ffi::Error norm(float epsilon, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> scale,
                ffi::RemainingArgs biases, ffi::ResultBuffer<ffi::F32> out) {
  const int64_t width = scale.dimensions()[0], rows = x.element_count() / width;
  const auto bias = biases.get<ffi::Buffer<ffi::F32>>(0);
  const float *scales = scale.typed_data(), *shifts = bias ? bias->typed_data() : nullptr;
  for (int64_t row = 0; row < rows; row++) {
    const float* in = x.typed_data() + row * width;
    float* result = out->typed_data() + row * width;
    const float middle = shifts ? sum_over<false>(in, 0, width) / width : 0;
    const float factor = 1 / std::sqrt(sum_over<true>(in, middle, width) / width + epsilon);
    for (int64_t i = 0; i < width; i++) {
      const float normed = (in[i] - middle) * factor * scales[i];
      result[i] = shifts ? normed + shifts[i] : normed;
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_norm, norm,
                              ffi::Ffi::Bind()
                                  .Attr<float>("epsilon")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>());
