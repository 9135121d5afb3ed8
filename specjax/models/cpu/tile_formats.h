// Kernels as tiles: the weights of 16 rows (outputs) and 32 or 256 inputs side by side, so that one
// vector instruction computes with all 16 rows.
//
// A kernel of R rows and D inputs is an array of ceil(R / 16) blocks of rows, each with D / inputs
// tiles. A tile keeps the integers and scales of its file's format in other places, and takes as
// many bytes, or a few more. It consists of
//
//   supers    16 half-precision numbers d for each row, then, with minimums, 16 numbers m
//   groups    for each 32 inputs: scale bytes [sub-groups][16], minimum bytes [sub-groups][16]
//             (formats of 256 inputs), then the integers
//
// Integers of 4 bits: byte 64 j + 4 row + k (j, k = 0..3) holds input 8 j + k in its low half and
// input 8 j + 4 + k in its high half. Of 2 bits: byte 64 j + 4 row + k (j = 0, 1) holds the inputs
// 16 j + 4 f + k, f = 0..3, in its bits 2 f. Of 8 bits: byte 64 j + 4 row + k (j = 0..7) holds input
// 4 j + k. Integers of 3, 5 and 6 bits are ones of 2 or 4 bits, followed by planes of further bits:
// bit 4 row + k of the j-th 8 bytes (j = 0..7) of a plane belongs to input 4 j + k. Floats of 16 bits
// stand by input, 16 rows each.

#ifndef SPECJAX_TILE_FORMATS_H_
#define SPECJAX_TILE_FORMATS_H_

#include <cstddef>
#include <cstdint>

namespace specjax {

constexpr int kTileRows = 16;
constexpr int kGroup = 32;

enum class Scales : int {
  kHalf,         // d in half precision for each 32 inputs
  kHalfMinimum,  // and a minimum m
  kBytes,        // a signed byte for each sub-group, times d for 256 inputs
  kBytesMinimum, // and an unsigned byte, times -m
  kNibbles,      // the same with scale and minimum in the halves of a byte
  kNone,         // floats
};

// A weight is scale * (integer - offset) + minimum. The names are those of GGUF.
struct Format {
  const char* name;
  int inputs;       // of a block of the file, and of a tile
  int block_bytes;  // of the file
  int bits;
  int offset;
  int sub;          // inputs that share a scale: 16 or 32
  Scales scales;
  bool table;       // the integers are indices of kTable, whose entries are offset by 128

  constexpr int groups() const { return inputs / kGroup; }
  constexpr int subs() const { return kGroup / sub; }
  constexpr bool has_minimums() const {
    return scales == Scales::kHalfMinimum || scales == Scales::kBytesMinimum ||
           scales == Scales::kNibbles;
  }
  constexpr int super_bytes() const {
    return scales == Scales::kNone ? 0 : 2 * kTileRows * (has_minimums() ? 2 : 1);
  }
  constexpr int scale_bytes() const {  // of a group
    if (scales == Scales::kBytes || scales == Scales::kNibbles) return kTileRows * subs();
    return scales == Scales::kBytesMinimum ? 2 * kTileRows * subs() : 0;
  }
  constexpr int group_bytes() const { return scale_bytes() + kTileRows * kGroup * bits / 8; }
  constexpr int tile_bytes() const { return super_bytes() + groups() * group_bytes(); }
};

constexpr Format kFormats[] = {
    {"Q4_0", 32, 18, 4, 8, 32, Scales::kHalf, false},
    {"Q4_1", 32, 20, 4, 0, 32, Scales::kHalfMinimum, false},
    {"Q5_0", 32, 22, 5, 16, 32, Scales::kHalf, false},
    {"Q5_1", 32, 24, 5, 0, 32, Scales::kHalfMinimum, false},
    {"Q8_0", 32, 34, 8, 128, 32, Scales::kHalf, false},
    {"Q2_K", 256, 84, 2, 0, 16, Scales::kNibbles, false},
    {"Q3_K", 256, 110, 3, 4, 16, Scales::kBytes, false},
    {"Q4_K", 256, 144, 4, 0, 32, Scales::kBytesMinimum, false},
    {"Q5_K", 256, 176, 5, 0, 32, Scales::kBytesMinimum, false},
    {"Q6_K", 256, 210, 6, 32, 16, Scales::kBytes, false},
    {"IQ4_NL", 32, 18, 4, 128, 32, Scales::kHalf, true},
    {"IQ4_XS", 256, 136, 4, 128, 32, Scales::kBytes, true},
    {"F16", 32, 64, 16, 0, 32, Scales::kNone, false},
    {"BF16", 32, 64, 16, 0, 32, Scales::kNone, false},
};
constexpr int kNumFormats = sizeof(kFormats) / sizeof(kFormats[0]);
constexpr int kHalfFloats = 12, kBrainFloats = 13;  // the indices of F16 and BF16

// The values of IQ4_NL and IQ4_XS, plus 128.
constexpr uint8_t kTable[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                129, 141, 153, 166, 181, 197, 217, 241};

// The bytes of a kernel of so many rows.
inline int64_t kernel_bytes(const Format& format, int64_t rows, int64_t width) {
  return (rows + kTileRows - 1) / kTileRows * (width / format.inputs) * format.tile_bytes();
}

}  // namespace specjax

#endif  // SPECJAX_TILE_FORMATS_H_
