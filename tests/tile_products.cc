// Prints a hash of the products of every format and kind of activations with random tiles, so that
// processors can be compared (`test_tiles.py`).

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "tile_product.h"

extern "C" void specjax_pack(int format, const uint8_t* blocks, int64_t rows, int64_t width,
                             int64_t first, uint8_t* tiles);
extern "C" void specjax_row(int format, const uint8_t* tiles, int64_t width, int64_t row,
                            float* weights);

namespace {

constexpr int64_t kWidth = 512, kRows = 37, kTokens = 11;

uint32_t state = 1;

uint32_t random_bits() {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

uint64_t hash_of(const std::vector<float>& values) {
  uint64_t hash = 1469598103934665603u;
  for (float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    hash = (hash ^ bits) * 1099511628211u;
  }
  return hash;
}

template <int kIndex>
void print_hashes() {
  const specjax::Format& format = specjax::kFormats[kIndex];
  const int64_t blocks = kRows * kWidth / format.inputs;
  std::vector<uint8_t> file(blocks * format.block_bytes);
  for (uint8_t& byte : file) byte = random_bits();
  // Numbers in half precision are at different places: none of them is infinite.
  for (uint8_t& byte : file)
    if ((byte & 0x7c) == 0x7c) byte &= 0x3f;
  std::vector<uint8_t> tiles(specjax::kernel_bytes(format, kRows, kWidth));
  specjax_pack(kIndex, file.data(), kRows, kWidth, 0, tiles.data());
  std::vector<float> x(kTokens * kWidth), y(kTokens * kRows), rows(kRows * kWidth);
  for (float& value : x) value = (static_cast<int>(random_bits() % 20001) - 10000) / 4096.0f;
  for (int planes = 0; planes <= 3; planes++) {
    const specjax::Activations activations(x.data(), kTokens, kWidth, planes);
    specjax::multiply_of<kIndex>(planes)(tiles.data(), 0, (kRows + 15) / 16, kRows, activations,
                                         y.data(), kRows);
    std::printf("%s %d %016llx\n", format.name, planes,
                static_cast<unsigned long long>(hash_of(y)));
  }
  for (int64_t row = 0; row < kRows; row++)
    specjax_row(kIndex, tiles.data(), kWidth, row, rows.data() + row * kWidth);
  std::printf("%s rows %016llx\n", format.name, static_cast<unsigned long long>(hash_of(rows)));
}

template <int... kIndices>
void print_all(std::integer_sequence<int, kIndices...>) {
  (print_hashes<kIndices>(), ...);
}

}  // namespace

int main() {
  print_all(std::make_integer_sequence<int, specjax::kNumFormats>{});
}
