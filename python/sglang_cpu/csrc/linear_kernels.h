// Products of few rows with a weight in its stored layout. Each call reads the weight from memory once for all rows.
// Tiles serve few rows and what panels (linear_panel_kernels.h) leave over.
#pragma once

#include "linear_panel_kernels.h"

namespace sglang_cpu {
namespace {

constexpr int64_t kLinearRows = kLanes == 4 ? 0 : 128;  // with four lanes a BLAS is faster
constexpr int64_t kLinearRowsBFloat16 = kLanes == 4 ? 0 : INT64_MAX;  // where torch emulates bfloat16

constexpr int kTileHeight = 4;                         // rows that share a loaded weight
constexpr int kAccumulators = kLanes == 16 ? 24 : 12;  // of 32 or 16 vector registers
constexpr int64_t kSpanBytes = 16384;                  // weights that stay in the L1 cache for all rows
constexpr int64_t kSpanColumns = kAccumulators;        // columns of a span come in multiples
constexpr int tile_width(int height) { return height == 1 ? 6 : kAccumulators / height; }
constexpr bool fills(int64_t columns) {
  for (int height = 1; height <= kTileHeight; height++)
    if (columns % tile_width(height) != 0) return false;
  return true;
}
static_assert(fills(kSpanColumns) && fills(kColumnUnit), "tiles of every height fill a span and a work item");
INLINE int64_t passes_of(const Linear& l) { return (l.rows + kTileHeight - 1) / kTileHeight; }

// A tile prefetches its share of the next span's weights, so that memory is never idle. Into the L2 cache: it has room
// for them, and of fetches into the L1 cache most cores have too few in flight to use the whole bandwidth of their
// memory. Where `prefetches_bypass_l2`, it is the other way round.
constexpr int kIntoL2 = 2, kBypassL2 = 0;

struct Ahead {
  int64_t columns;  // from a column to the same column of the next span
  int64_t part;     // elements of a weight row that one block of rows prefetches
  int64_t step;     // elements between prefetches; one prefetch per vector
};

// Computes [HEIGHT, WIDTH] elements of the result. Each element has one vector accumulator, which runs over the inner
// dimension from start to end in every tile shape. So a row's bits depend neither on other rows nor on the threads.
template <int HEIGHT, int WIDTH, int HINT, typename T>
INLINE void linear_tile(const Linear& l, int64_t row, int64_t column, const Ahead& ahead) {
  const float* x[HEIGHT];
  const T *w[WIDTH], *next[WIDTH];
  Vec acc[HEIGHT][WIDTH] = {};
  for (int i = 0; i < HEIGHT; i++) x[i] = l.x + (row + i) * l.x_stride;
  for (int j = 0; j < WIDTH; j++) {
    w[j] = static_cast<const T*>(l.weight) + (column + j) * l.weight_stride;
    next[j] = w[j] + ahead.columns * l.weight_stride + row / kTileHeight * ahead.part;
  }
  int64_t k = 0;
  for (; k + kLanes <= l.inner; k += kLanes) {
    Vec weight[WIDTH];
    for (int j = 0; j < WIDTH; j++) weight[j] = load(w[j] + k);
    for (int j = 0; j < WIDTH; j++) {
      __builtin_prefetch(next[j], 0, HINT);
      next[j] += ahead.step;
    }
    for (int i = 0; i < HEIGHT; i++) {
      const Vec value = load(x[i] + k);
      for (int j = 0; j < WIDTH; j++) acc[i][j] += value * weight[j];
    }
  }
  if (k < l.inner) {
    const int64_t rest = l.inner - k;
    for (int j = 0; j < WIDTH; j++) {
      const Vec weight = load_some(w[j] + k, rest);
      for (int i = 0; i < HEIGHT; i++) acc[i][j] += load_some(x[i] + k, rest) * weight;
    }
  }
  float result[HEIGHT * WIDTH];
  sums<HEIGHT * WIDTH>(&acc[0][0], result);
  for (int i = 0; i < HEIGHT; i++) {
    T* out = static_cast<T*>(l.out) + (row + i) * l.out_stride + column;
    if (l.addend) {
      const T* addend = static_cast<const T*>(l.addend) + (row + i) * l.addend_stride + column;
      for (int j = 0; j < WIDTH; j++) narrow(out + j, result[i * WIDTH + j] + wide(addend[j]));
    } else {
      for (int j = 0; j < WIDTH; j++) narrow(out + j, result[i * WIDTH + j]);
    }
  }
}

template <int HEIGHT, int HINT, typename T>
INLINE void linear_columns(const Linear& l, int64_t row, int64_t begin, int64_t end, const Ahead& ahead) {
  constexpr int kWidth = tile_width(HEIGHT);
  int64_t column = begin;
  for (; column + kWidth <= end; column += kWidth) linear_tile<HEIGHT, kWidth, HINT, T>(l, row, column, ahead);
  for (; column < end; column++) linear_tile<HEIGHT, 1, HINT, T>(l, row, column, ahead);
}

template <int HINT, typename T>
void linear_of(const Linear& l, int64_t begin, int64_t end) {
  const int64_t passes = passes_of(l);
  const int64_t fit = kSpanBytes / int64_t(sizeof(T)) / larger(l.inner, 1) / kSpanColumns;
  const int64_t span = larger(fit, 1) * kSpanColumns;
  const Ahead ahead{span, l.inner / passes, larger(kLanes / passes, 1)};
  for (int64_t column = begin; column < end; column += span) {
    const int64_t stop = smaller(column + span, end);
    int64_t row = 0;
    for (; row + kTileHeight <= l.rows; row += kTileHeight)
      linear_columns<kTileHeight, HINT, T>(l, row, column, stop, ahead);
    switch (l.rows - row) {
      case 1: linear_columns<1, HINT, T>(l, row, column, stop, ahead); break;
      case 2: linear_columns<2, HINT, T>(l, row, column, stop, ahead); break;
      case 3: linear_columns<3, HINT, T>(l, row, column, stop, ahead); break;
    }
  }
}

// Computes columns begin .. end - 1 of the result: panels compute the first rows, tiles the others.
template <typename T>
void linear_in_two(const Linear& l, int64_t begin, int64_t end) {
  Linear few = l;
  if (l.panel_rows) {
    few.rows = l.panel_rows;
    panels_of<T>(few, begin, end);
    few.rows = l.rows - l.panel_rows;
    few.x += l.panel_rows * l.x_stride;
    few.out = static_cast<T*>(l.out) + l.panel_rows * l.out_stride;
    if (l.addend) few.addend = static_cast<const T*>(l.addend) + l.panel_rows * l.addend_stride;
  }
  if (few.rows == 0) return;
  prefetches_bypass_l2() ? linear_of<kBypassL2, T>(few, begin, end) : linear_of<kIntoL2, T>(few, begin, end);
}

void linear(const Linear& l, int64_t begin, int64_t end) {
  if (l.type == Type::kFloat)
    linear_in_two<float>(l, begin, end);
  else
    linear_in_two<BFloat16>(l, begin, end);
}

}  // namespace
}  // namespace sglang_cpu
