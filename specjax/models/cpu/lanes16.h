// Sixteen lanes, one for each row of a tile, and what the processor computes with them: the widest
// instructions that the compiler may use. All of them give the same bits.

#ifndef SPECJAX_LANES16_H_
#define SPECJAX_LANES16_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if !defined(SPECJAX_PORTABLE)
#if defined(__AVX512BW__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif
#endif

namespace specjax {

// Floats and Ints have 16 lanes; Bytes are 64, four for each lane. `to_nearest` rounds half to even.
// A number is higher_digits * 256 + low_digit, which is -128 to 127. `dot` adds the products of each
// lane's four unsigned bytes with four signed ones to it. Where a lane's bytes have all 8 bits
// (kWide), `dot` may take them less kWideOffset, which callers allow for. Processors without such an
// instruction (SPECJAX_PAIRS) have `multiply_pairs` instead, sums of two products in 16 bits.

#if !defined(SPECJAX_PORTABLE) && defined(__AVX512BW__)

using Floats = __m512;
using Ints = __m512i;
using Bytes = __m512i;
constexpr int kWideOffset = 0, kRegisters = 32;

inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats from_halves(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}
inline Floats from_brain_floats(const uint8_t* from) {
  const __m256i bits = _mm256_loadu_si256((const __m256i*)from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Floats from_unsigned(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
inline Floats from_signed(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
inline Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints times_256(Ints a) { return _mm512_slli_epi32(a, 8); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints to_nearest(Floats a) { return _mm512_cvtps_epi32(a); }
inline Ints low_digit(Ints a) { return _mm512_srai_epi32(_mm512_slli_epi32(a, 24), 24); }
inline Ints higher_digits(Ints a, Ints low) { return _mm512_srai_epi32(_mm512_sub_epi32(a, low), 8); }
inline int32_t sum(Ints a) { return _mm512_reduce_add_epi32(a); }
inline void store_digits(int8_t* to, Ints a) {
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(a));
}
inline Bytes load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline void store_bytes(uint8_t* to, Bytes x) { _mm512_storeu_si512(to, x); }
// (bytes >> shift) & mask, for masks that leave nothing of a neighbouring byte.
template <int kShift>
inline Bytes field(Bytes bytes, uint8_t mask) {
  return _mm512_and_si512(_mm512_srli_epi16(bytes, kShift), _mm512_set1_epi8(mask));
}
// Adds `value` to the bytes whose bit is set.
inline Bytes add_where(Bytes bytes, const uint8_t* bits, uint8_t value) {
  uint64_t mask;
  std::memcpy(&mask, bits, 8);
  return _mm512_mask_add_epi8(bytes, mask, bytes, _mm512_set1_epi8(value));
}
inline Bytes look_up(const uint8_t* table, Bytes indices) {
  const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return _mm512_shuffle_epi8(all, indices);
}
inline Bytes subtract(Bytes bytes, uint8_t value) {
  return _mm512_sub_epi8(bytes, _mm512_set1_epi8(value));
}
// The lane's byte k, which is unsigned or signed, as a float.
template <int k, bool kSigned>
inline Floats byte_as_float(Bytes bytes) {
  if constexpr (kSigned)
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes, 24 - 8 * k), 24));
  return _mm512_cvtepi32_ps(
      _mm512_and_si512(_mm512_srli_epi32(bytes, 8 * k), _mm512_set1_epi32(255)));
}
#if defined(__AVX512VNNI__)
template <bool kWide>
inline Ints dot(Ints sums, Bytes bytes, int32_t four) {
  return _mm512_dpbusd_epi32(sums, bytes, _mm512_set1_epi32(four));
}
#else
#define SPECJAX_PAIRS
inline Ints multiply_pairs(Bytes bytes, int32_t four) {
  return _mm512_maddubs_epi16(bytes, _mm512_set1_epi32(four));
}
inline Ints add_pairs(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
inline Ints sum_pairs(Ints a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
inline Ints times_16(Ints a) { return _mm512_slli_epi32(a, 4); }
#endif

#elif !defined(SPECJAX_PORTABLE) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Floats { __m256 low, high; };
struct Ints { __m256i low, high; };
using Bytes = Ints;
constexpr int kWideOffset = 0, kRegisters = 8;  // pairs

inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}
inline Floats multiply(Floats a, Floats b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats from_halves(const uint8_t* from) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 16)))};
}
inline Floats from_brain_floats(const uint8_t* from) {
  const auto half = [](const uint8_t* bits) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)bits));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  };
  return {half(from), half(from + 16)};
}
inline Floats from_unsigned(const uint8_t* from) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from))),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8))))};
}
inline Floats from_signed(const uint8_t* from) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8))))};
}
inline Ints splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints add(Ints a, Ints b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
inline Ints times_256(Ints a) {
  return {_mm256_slli_epi32(a.low, 8), _mm256_slli_epi32(a.high, 8)};
}
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
inline Ints to_nearest(Floats a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
inline Ints low_digit(Ints a) {
  return {_mm256_srai_epi32(_mm256_slli_epi32(a.low, 24), 24),
          _mm256_srai_epi32(_mm256_slli_epi32(a.high, 24), 24)};
}
inline Ints higher_digits(Ints a, Ints low) {
  return {_mm256_srai_epi32(_mm256_sub_epi32(a.low, low.low), 8),
          _mm256_srai_epi32(_mm256_sub_epi32(a.high, low.high), 8)};
}
inline int32_t sum(Ints a) {
  const __m256i both = _mm256_add_epi32(a.low, a.high);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline void store_digits(int8_t* to, Ints a) {
  const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.low, a.high), 0xd8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storeu_si128((__m128i*)to, bytes);
}
inline Bytes load_bytes(const uint8_t* from) {
  return {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)(from + 32))};
}
inline void store_bytes(uint8_t* to, Bytes x) {
  _mm256_storeu_si256((__m256i*)to, x.low);
  _mm256_storeu_si256((__m256i*)(to + 32), x.high);
}
template <int kShift>
inline Bytes field(Bytes bytes, uint8_t mask) {
  const __m256i all = _mm256_set1_epi8(mask);
  return {_mm256_and_si256(_mm256_srli_epi16(bytes.low, kShift), all),
          _mm256_and_si256(_mm256_srli_epi16(bytes.high, kShift), all)};
}
inline Bytes add_where(Bytes bytes, const uint8_t* bits, uint8_t value) {
  const __m256i which = _mm256_set1_epi64x(0x8040201008040201);
  const __m256i order = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                         2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const auto added = [&](__m256i part, const uint8_t* four) {
    int32_t mask;
    std::memcpy(&mask, four, 4);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(mask), order);
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, which), which);
    return _mm256_add_epi8(part, _mm256_and_si256(is_set, _mm256_set1_epi8(value)));
  };
  return {added(bytes.low, bits), added(bytes.high, bits + 4)};
}
inline Bytes look_up(const uint8_t* table, Bytes indices) {
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(all, indices.low), _mm256_shuffle_epi8(all, indices.high)};
}
inline Bytes subtract(Bytes bytes, uint8_t value) {
  const __m256i all = _mm256_set1_epi8(value);
  return {_mm256_sub_epi8(bytes.low, all), _mm256_sub_epi8(bytes.high, all)};
}
template <int k, bool kSigned>
inline Floats byte_as_float(Bytes bytes) {
  const auto half = [](__m256i part) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(part, 24 - 8 * k), 24));
  };
  if constexpr (kSigned) return {half(bytes.low), half(bytes.high)};
  const __m256i mask = _mm256_set1_epi32(255);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(bytes.low, 8 * k), mask)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(bytes.high, 8 * k), mask))};
}
#if defined(__AVXVNNI__)
template <bool kWide>
inline Ints dot(Ints sums, Bytes bytes, int32_t four) {
  const __m256i digits = _mm256_set1_epi32(four);
  return {_mm256_dpbusd_avx_epi32(sums.low, bytes.low, digits),
          _mm256_dpbusd_avx_epi32(sums.high, bytes.high, digits)};
}
#else
#define SPECJAX_PAIRS
inline Ints multiply_pairs(Bytes bytes, int32_t four) {
  const __m256i digits = _mm256_set1_epi32(four);
  return {_mm256_maddubs_epi16(bytes.low, digits), _mm256_maddubs_epi16(bytes.high, digits)};
}
inline Ints add_pairs(Ints a, Ints b) {
  return {_mm256_add_epi16(a.low, b.low), _mm256_add_epi16(a.high, b.high)};
}
inline Ints sum_pairs(Ints a) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(a.low, ones), _mm256_madd_epi16(a.high, ones)};
}
inline Ints times_16(Ints a) {
  return {_mm256_slli_epi32(a.low, 4), _mm256_slli_epi32(a.high, 4)};
}
#endif

#elif !defined(SPECJAX_PORTABLE) && defined(__ARM_FEATURE_DOTPROD)

struct Floats { float32x4_t part[4]; };
struct Ints { int32x4_t part[4]; };
struct Bytes { uint8x16_t part[4]; };
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kWideOffset = 0;
#else
constexpr int kWideOffset = 128;
#endif
constexpr int kRegisters = 8;  // of four each

#define SPECJAX_EACH(expression)                  \
  decltype(result) each = {};                     \
  for (int i = 0; i < 4; i++) each.part[i] = expression; \
  return each;

inline Floats splat(float x) { Floats result; SPECJAX_EACH(vdupq_n_f32(x)) }
inline Floats load(const float* from) { Floats result; SPECJAX_EACH(vld1q_f32(from + 4 * i)) }
inline void store(float* to, Floats x) {
  for (int i = 0; i < 4; i++) vst1q_f32(to + 4 * i, x.part[i]);
}
inline Floats multiply(Floats a, Floats b) {
  Floats result;
  SPECJAX_EACH(vmulq_f32(a.part[i], b.part[i]))
}
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  Floats result;
  SPECJAX_EACH(vfmaq_f32(c.part[i], a.part[i], b.part[i]))
}
inline Floats from_halves(const uint8_t* from) {
  Floats result;
  SPECJAX_EACH(vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 8 * i))))
}
inline Floats from_brain_floats(const uint8_t* from) {
  Floats result;
  SPECJAX_EACH(vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(from + 8 * i)), 16)))
}
inline Floats from_unsigned(const uint8_t* from) {
  const uint8x16_t all = vld1q_u8(from);
  const uint16x8_t halves[2] = {vmovl_u8(vget_low_u8(all)), vmovl_u8(vget_high_u8(all))};
  Floats result;
  SPECJAX_EACH(vcvtq_f32_u32(vmovl_u16(i % 2 ? vget_high_u16(halves[i / 2])
                                             : vget_low_u16(halves[i / 2]))))
}
inline Floats from_signed(const uint8_t* from) {
  const int8x16_t all = vreinterpretq_s8_u8(vld1q_u8(from));
  const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(all)), vmovl_s8(vget_high_s8(all))};
  Floats result;
  SPECJAX_EACH(vcvtq_f32_s32(vmovl_s16(i % 2 ? vget_high_s16(halves[i / 2])
                                             : vget_low_s16(halves[i / 2]))))
}
inline Ints splat_int(int32_t x) { Ints result; SPECJAX_EACH(vdupq_n_s32(x)) }
inline Ints add(Ints a, Ints b) { Ints result; SPECJAX_EACH(vaddq_s32(a.part[i], b.part[i])) }
inline Ints times_256(Ints a) { Ints result; SPECJAX_EACH(vshlq_n_s32(a.part[i], 8)) }
inline Floats to_floats(Ints a) { Floats result; SPECJAX_EACH(vcvtq_f32_s32(a.part[i])) }
inline Ints to_nearest(Floats a) { Ints result; SPECJAX_EACH(vcvtnq_s32_f32(a.part[i])) }
inline Ints low_digit(Ints a) {
  Ints result;
  SPECJAX_EACH(vshrq_n_s32(vshlq_n_s32(a.part[i], 24), 24))
}
inline Ints higher_digits(Ints a, Ints low) {
  Ints result;
  SPECJAX_EACH(vshrq_n_s32(vsubq_s32(a.part[i], low.part[i]), 8))
}
inline int32_t sum(Ints a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.part[0], a.part[1]), vaddq_s32(a.part[2], a.part[3])));
}
inline void store_digits(int8_t* to, Ints a) {
  for (int i = 0; i < 2; i++)
    vst1_s8(to + 8 * i, vmovn_s16(vcombine_s16(vmovn_s32(a.part[2 * i]),
                                               vmovn_s32(a.part[2 * i + 1]))));
}
inline Bytes load_bytes(const uint8_t* from) { Bytes result; SPECJAX_EACH(vld1q_u8(from + 16 * i)) }
inline void store_bytes(uint8_t* to, Bytes x) {
  for (int i = 0; i < 4; i++) vst1q_u8(to + 16 * i, x.part[i]);
}
template <int kShift>
inline Bytes field(Bytes bytes, uint8_t mask) {
  Bytes result;
  const uint8x16_t all = vdupq_n_u8(mask);
  if constexpr (kShift == 0) {
    SPECJAX_EACH(vandq_u8(bytes.part[i], all))
  } else {
    SPECJAX_EACH(vandq_u8(vshrq_n_u8(bytes.part[i], kShift), all))
  }
}
inline Bytes add_where(Bytes bytes, const uint8_t* bits, uint8_t value) {
  static const uint8_t kWhich[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t which = vld1q_u8(kWhich), all = vdupq_n_u8(value);
  Bytes result;
  SPECJAX_EACH(vaddq_u8(bytes.part[i],
                        vandq_u8(vtstq_u8(vcombine_u8(vdup_n_u8(bits[2 * i]),
                                                      vdup_n_u8(bits[2 * i + 1])), which), all)))
}
inline Bytes look_up(const uint8_t* table, Bytes indices) {
  const uint8x16_t all = vld1q_u8(table);
  Bytes result;
  SPECJAX_EACH(vqtbl1q_u8(all, indices.part[i]))
}
inline Bytes subtract(Bytes bytes, uint8_t value) {
  Bytes result;
  SPECJAX_EACH(vsubq_u8(bytes.part[i], vdupq_n_u8(value)))
}
template <int k, bool kSigned>
inline Floats byte_as_float(Bytes bytes) {
  const uint32x4_t mask = vdupq_n_u32(255);
  Floats result;
  if constexpr (kSigned) {
    SPECJAX_EACH(vcvtq_f32_s32(
        vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_u8(bytes.part[i]), 24 - 8 * k), 24)))
  } else if constexpr (k == 0) {
    SPECJAX_EACH(vcvtq_f32_u32(vandq_u32(vreinterpretq_u32_u8(bytes.part[i]), mask)))
  } else {
    SPECJAX_EACH(vcvtq_f32_u32(
        vandq_u32(vshrq_n_u32(vreinterpretq_u32_u8(bytes.part[i]), 8 * k), mask)))
  }
}
template <bool kWide>
inline Ints dot(Ints sums, Bytes bytes, int32_t four) {
  const int8x16_t digits = vreinterpretq_s8_s32(vdupq_n_s32(four));
  Ints result;
#if defined(__ARM_FEATURE_MATMUL_INT8)
  SPECJAX_EACH(vusdotq_s32(sums.part[i], bytes.part[i], digits))
#else
  const uint8x16_t flip = vdupq_n_u8(kWide ? 128 : 0);
  SPECJAX_EACH(vdotq_s32(sums.part[i], vreinterpretq_s8_u8(veorq_u8(bytes.part[i], flip)), digits))
#endif
}
#undef SPECJAX_EACH

#else

struct Floats { float lane[16]; };
struct Ints { int32_t lane[16]; };
struct Bytes { uint8_t byte[64]; };
constexpr int kWideOffset = 0, kRegisters = 8;

template <typename Result, typename Function>
inline Result each_lane(Function function) {
  Result result;
  for (int i = 0; i < 16; i++) result.lane[i] = function(i);
  return result;
}
inline float half_as_float(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, rest = half & 1023;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * rest * (1.0f / (1 << 24));
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | rest << 13;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
inline Floats splat(float x) { return each_lane<Floats>([&](int) { return x; }); }
inline Floats load(const float* from) { return each_lane<Floats>([&](int i) { return from[i]; }); }
inline void store(float* to, const Floats& x) { std::memcpy(to, x.lane, sizeof(x.lane)); }
inline Floats multiply(const Floats& a, const Floats& b) {
  return each_lane<Floats>([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
  return each_lane<Floats>([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
inline Floats from_halves(const uint8_t* from) {
  return each_lane<Floats>([&](int i) { return half_as_float(from + 2 * i); });
}
inline Floats from_brain_floats(const uint8_t* from) {
  return each_lane<Floats>([&](int i) {
    const uint32_t bits = static_cast<uint32_t>(from[2 * i] | from[2 * i + 1] << 8) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
  });
}
inline Floats from_unsigned(const uint8_t* from) {
  return each_lane<Floats>([&](int i) { return static_cast<float>(from[i]); });
}
inline Floats from_signed(const uint8_t* from) {
  return each_lane<Floats>([&](int i) { return static_cast<float>(static_cast<int8_t>(from[i])); });
}
inline Ints splat_int(int32_t x) { return each_lane<Ints>([&](int) { return x; }); }
inline Ints add(const Ints& a, const Ints& b) {
  return each_lane<Ints>([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Ints times_256(const Ints& a) {
  return each_lane<Ints>([&](int i) { return a.lane[i] * 256; });
}
inline Floats to_floats(const Ints& a) {
  return each_lane<Floats>([&](int i) { return static_cast<float>(a.lane[i]); });
}
inline Ints to_nearest(const Floats& a) {
  return each_lane<Ints>([&](int i) { return static_cast<int32_t>(std::nearbyintf(a.lane[i])); });
}
inline Ints low_digit(const Ints& a) {
  return each_lane<Ints>([&](int i) { return static_cast<int32_t>(static_cast<int8_t>(a.lane[i])); });
}
inline Ints higher_digits(const Ints& a, const Ints& low) {
  return each_lane<Ints>([&](int i) { return (a.lane[i] - low.lane[i]) / 256; });
}
inline int32_t sum(const Ints& a) {
  int32_t result = 0;
  for (int32_t lane : a.lane) result += lane;
  return result;
}
inline void store_digits(int8_t* to, const Ints& a) {
  for (int i = 0; i < 16; i++) to[i] = static_cast<int8_t>(a.lane[i]);
}
inline Bytes load_bytes(const uint8_t* from) {
  Bytes result;
  std::memcpy(result.byte, from, 64);
  return result;
}
inline void store_bytes(uint8_t* to, const Bytes& x) { std::memcpy(to, x.byte, 64); }
template <int kShift>
inline Bytes field(const Bytes& bytes, uint8_t mask) {
  Bytes result;
  for (int i = 0; i < 64; i++) result.byte[i] = (bytes.byte[i] >> kShift) & mask;
  return result;
}
inline Bytes add_where(const Bytes& bytes, const uint8_t* bits, uint8_t value) {
  Bytes result;
  for (int i = 0; i < 64; i++)
    result.byte[i] = bytes.byte[i] + ((bits[i / 8] >> (i % 8)) & 1) * value;
  return result;
}
inline Bytes look_up(const uint8_t* table, const Bytes& indices) {
  Bytes result;
  for (int i = 0; i < 64; i++) result.byte[i] = table[indices.byte[i]];
  return result;
}
inline Bytes subtract(const Bytes& bytes, uint8_t value) {
  Bytes result;
  for (int i = 0; i < 64; i++) result.byte[i] = bytes.byte[i] - value;
  return result;
}
template <int k, bool kSigned>
inline Floats byte_as_float(const Bytes& bytes) {
  return each_lane<Floats>([&](int i) {
    const uint8_t byte = bytes.byte[4 * i + k];
    return kSigned ? static_cast<float>(static_cast<int8_t>(byte)) : static_cast<float>(byte);
  });
}
template <bool kWide>
inline Ints dot(const Ints& sums, const Bytes& bytes, int32_t four) {
  int8_t digits[4];
  std::memcpy(digits, &four, 4);
  return each_lane<Ints>([&](int i) {
    int32_t sum = sums.lane[i];
    for (int k = 0; k < 4; k++) sum += bytes.byte[4 * i + k] * digits[k];
    return sum;
  });
}

#endif

// The sum of kCount products: each lane's four bytes of kBits bits, which may be less kWideOffset if
// they are 8, with four signed bytes at `digits`.
template <int kBits, int kCount>
inline Ints dots(const Bytes* bytes, const int8_t* digits) {
  const auto four = [&](int j) {
    int32_t result;
    std::memcpy(&result, digits + 4 * j, 4);
    return result;
  };
#if !defined(SPECJAX_PAIRS)
  // Two sums, since each product waits for the one before it.
  Ints even = splat_int(0), odd = splat_int(0);
#pragma GCC unroll 8
  for (int j = 0; j < kCount; j += 2) {
    even = dot<kBits == 8>(even, bytes[j], four(j));
    odd = dot<kBits == 8>(odd, bytes[j + 1], four(j + 1));
  }
  return add(even, odd);
#else
  // As many sums of pairs are added up as fit into 16 bits, and bytes of 8 bits are halved.
  Ints result = splat_int(0);
  if constexpr (kBits == 8) {
    Ints low = splat_int(0), high = splat_int(0);
#pragma GCC unroll 8
    for (int j = 0; j < kCount; j++) {
      low = add_pairs(low, multiply_pairs(field<0>(bytes[j], 15), four(j)));
      high = add_pairs(high, multiply_pairs(field<4>(bytes[j], 15), four(j)));
    }
    result = add(sum_pairs(low), times_16(sum_pairs(high)));
  } else {
    constexpr int kFit = std::min(kCount, kBits <= 4 ? 8 : kBits == 5 ? 4 : 2);
#pragma GCC unroll 4
    for (int first = 0; first < kCount; first += kFit) {
      Ints some = multiply_pairs(bytes[first], four(first));
#pragma GCC unroll 8
      for (int j = first + 1; j < first + kFit; j++)
        some = add_pairs(some, multiply_pairs(bytes[j], four(j)));
      result = first ? add(result, sum_pairs(some)) : sum_pairs(some);
    }
  }
  return result;
#endif
}

}  // namespace specjax

#endif  // SPECJAX_LANES16_H_
