// Products with kernels in tiles, and rows of their weights: custom calls of XLA.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common.h"
#include "tile_product.h"

extern "C" void specjax_row(int format, const uint8_t* tiles, int64_t width, int64_t row,
                            float* weights);

namespace {

using specjax::Activations;
using specjax::kFormats;
using specjax::kTileRows;

// Some outputs of a kernel, in one format.
struct Part {
  int format;
  int64_t rows;
};

// The parts of one layer, and where its bytes begin.
struct Layer {
  std::vector<Part> parts;
  int64_t offset;
};

// Reads a layout: the number of kinds of layers; for each its number of parts, and their formats
// and rows; then the kind of each layer.
Layer read_layer(ffi::Span<const int64_t> layout, int64_t index, int64_t width) {
  std::vector<std::vector<Part>> kinds;
  std::vector<int64_t> bytes;
  int64_t at = 0;
  for (int64_t kind = layout[at++]; kind > 0; kind--) {
    kinds.emplace_back();
    bytes.push_back(0);
    for (int64_t part = layout[at++]; part > 0; part--, at += 2) {
      kinds.back().push_back({static_cast<int>(layout[at]), layout[at + 1]});
      bytes.back() += specjax::kernel_bytes(kFormats[layout[at]], layout[at + 1], width);
    }
  }
  int64_t offset = 0;
  for (int64_t layer = 0; layer < index; layer++) offset += bytes[layout[at + layer]];
  return {kinds[layout[at + index]], offset};
}

// The function for a format, by its index in kFormats.
template <int... kIndices>
specjax::MultiplyBlocks multiply_of(int format, int planes, std::integer_sequence<int, kIndices...>) {
  using Function = specjax::MultiplyBlocks (*)(int);
  static constexpr Function all[] = {specjax::multiply_of<kIndices>...};
  return all[format](planes);
}

// Consecutive blocks of rows of a part, whose outputs begin at `column`.
struct Piece {
  specjax::MultiplyBlocks multiply;
  const uint8_t* tiles;
  int64_t first, last, rows, column;
};

ffi::Error product(ffi::ThreadPool pool, int32_t planes, ffi::Span<const int64_t> layout,
                   ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::U8> data,
                   ffi::ResultBuffer<ffi::F32> out) {
  const int64_t tokens = x.dimensions()[0], width = x.dimensions()[1];
  const int64_t stride = out->dimensions()[1];
  const Layer chosen = read_layer(layout, layer.typed_data()[0], width);
  const uint8_t* tiles = data.typed_data() + chosen.offset;
  // Small pieces, so that a thread that is interrupted delays the others little.
  const int64_t blocks = (stride + kTileRows - 1) / kTileRows;
  const int64_t step = std::clamp<int64_t>(blocks / (4 * std::max<int64_t>(1, pool.num_threads())), 1, 64);
  auto pieces = std::make_shared<std::vector<Piece>>();
  int64_t column = 0;
  for (const Part& part : chosen.parts) {
    const auto multiply = multiply_of(
        part.format, planes, std::make_integer_sequence<int, specjax::kNumFormats>{});
    const int64_t last = (part.rows + kTileRows - 1) / kTileRows;
    for (int64_t first = 0; first < last; first += step)
      pieces->push_back({multiply, tiles, first, std::min(last, first + step), part.rows, column});
    tiles += specjax::kernel_bytes(kFormats[part.format], part.rows, width);
    column += part.rows;
  }
  auto activations = std::make_shared<Activations>(x.typed_data(), tokens, width, planes);
  float* result = out->typed_data();
  specjax::in_parallel(pool, pieces->size(), [=](int64_t number) {
    const Piece& piece = (*pieces)[number];
    piece.multiply(piece.tiles, piece.first, piece.last, piece.rows, *activations,
                   result + piece.column, stride);
  });
  return ffi::Error::Success();
}

ffi::Error rows(ffi::ThreadPool pool, ffi::Span<const int64_t> layout, ffi::Buffer<ffi::S32> ids,
                ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::U8> data,
                ffi::ResultBuffer<ffi::F32> out) {
  const int64_t width = out->dimensions()[1], count = ids.element_count();
  const Layer chosen = read_layer(layout, layer.typed_data()[0], width);
  const uint8_t* all_tiles = data.typed_data() + chosen.offset;
  const int32_t* chosen_ids = ids.typed_data();
  float* weights = out->typed_data();
  auto parts = std::make_shared<std::vector<Part>>(chosen.parts);
  const int64_t step = 64;
  specjax::in_parallel(pool, (count + step - 1) / step, [=](int64_t number) {
    for (int64_t at = number * step; at < std::min(count, (number + 1) * step); at++) {
      const uint8_t* tiles = all_tiles;
      int64_t row = chosen_ids[at];
      size_t part = 0;
      while (part + 1 < parts->size() && row >= (*parts)[part].rows) {
        row -= (*parts)[part].rows;
        tiles += specjax::kernel_bytes(kFormats[(*parts)[part].format], (*parts)[part].rows, width);
        part++;
      }
      row = std::clamp<int64_t>(row, 0, (*parts)[part].rows - 1);
      specjax_row((*parts)[part].format, tiles, width, row, weights + at * width);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_tile_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int32_t>("planes")
                                  .Attr<ffi::Span<const int64_t>>("layout")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_tile_rows, rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<ffi::Span<const int64_t>>("layout")
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
