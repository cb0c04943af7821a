// Products with a weight as it lies in memory. Up to kTiledRows, every weight is read once for all rows, and a row's
// bits depend neither on the rows beside it nor on the threads. With AVX2, more rows of float32 are laid side by side
// in panels beforehand, so that one weight meets vectors of rows: nearer to what a core can multiply, in another order
// of the sums, which again is the same whatever stands beside a row.
#pragma once

#include "vec.h"

namespace sglang_dflash {
namespace {

constexpr int64_t kTiledRows = kLanes == 4 ? 0 : 64;  // up to which tiles beat a BLAS
constexpr bool kPanels = kLanes == 8;                 // with 16 lanes they have not been measured
constexpr int64_t kLinearRows = kPanels ? 512 : kTiledRows;

template <typename T>
INLINE const T* weights_of(const Linear& l, int64_t column) {
  return static_cast<const T*>(l.weight) + column * l.weight_stride;
}

// Writes the sums of `count` columns of one row, the addend put to them.
template <typename T>
INLINE void write_sums(const Linear& l, int64_t row, int64_t column, int64_t count, const float* sums) {
  T* out = static_cast<T*>(l.out) + row * l.out_stride + column;
  if (l.addend) {
    const T* addend = static_cast<const T*>(l.addend) + row * l.addend_stride + column;
    for (int64_t j = 0; j < count; j++) narrow(out + j, sums[j] + wide(addend[j]));
  } else {
    for (int64_t j = 0; j < count; j++) narrow(out + j, sums[j]);
  }
}

// Tiles.

constexpr int kTileHeight = 4;                         // rows that share a loaded weight
constexpr int kAccumulators = kLanes == 16 ? 24 : 12;  // of 32 or 16 vector registers
constexpr int64_t kSpanBytes = 16384;                  // weights that stay in the first cache for all rows
constexpr int64_t kSpanColumns = kAccumulators;        // a multiple of every tile's width
constexpr int tile_width(int height) { return height == 1 ? 6 : kAccumulators / height; }

// What a tile prefetches while it multiplies: its share of the weights of the span to come, so that memory never rests.
struct Ahead {
  int64_t columns;  // from a column to its like in the next span
  int64_t part;     // of a weight's row, for each block of rows
  int64_t step;     // per vector
};

// [HEIGHT, WIDTH] of the result. Each element is one vector accumulator over the inner dimension from its beginning to
// its end, whatever the tile: a row's bits depend neither on the rows beside it nor on the threads.
template <int HEIGHT, int WIDTH, typename T>
INLINE void linear_tile(const Linear& l, int64_t row, int64_t column, const Ahead& ahead) {
  const float* x[HEIGHT];
  const T *w[WIDTH], *next[WIDTH];
  Vec acc[HEIGHT][WIDTH] = {};
  for (int i = 0; i < HEIGHT; i++) x[i] = l.x + (row + i) * l.x_stride;
  for (int j = 0; j < WIDTH; j++) {
    w[j] = weights_of<T>(l, column + j);
    next[j] = w[j] + ahead.columns * l.weight_stride + row / kTileHeight * ahead.part;
  }
  int64_t k = 0;
  for (; k + kLanes <= l.inner; k += kLanes) {
    Vec weight[WIDTH];
    for (int j = 0; j < WIDTH; j++) weight[j] = load(w[j] + k);
    for (int j = 0; j < WIDTH; j++) __builtin_prefetch(next[j]), next[j] += ahead.step;
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
  const Vec* flat = &acc[0][0];
  int n = 0;
  for (; n + 4 <= HEIGHT * WIDTH; n += 4) {
    const Vec4 four = sums(flat[n], flat[n + 1], flat[n + 2], flat[n + 3]);
    memcpy(result + n, &four, sizeof four);
  }
  for (; n < HEIGHT * WIDTH; n++) result[n] = sum(flat[n]);
  for (int i = 0; i < HEIGHT; i++) write_sums<T>(l, row + i, column, WIDTH, result + i * WIDTH);
}

template <int HEIGHT, typename T>
INLINE void linear_columns(const Linear& l, int64_t row, int64_t begin, int64_t end, const Ahead& ahead) {
  constexpr int kWidth = tile_width(HEIGHT);
  int64_t column = begin;
  for (; column + kWidth <= end; column += kWidth) linear_tile<HEIGHT, kWidth, T>(l, row, column, ahead);
  for (; column < end; column++) linear_tile<HEIGHT, 1, T>(l, row, column, ahead);
}

template <typename T>
void tiled(const Linear& l, int64_t begin, int64_t end) {
  const int64_t passes = (l.rows + kTileHeight - 1) / kTileHeight;
  const int64_t fit = kSpanBytes / int64_t(sizeof(T)) / larger(l.inner, 1) / kSpanColumns;
  const int64_t span = larger(fit, 1) * kSpanColumns;
  const Ahead ahead{span, l.inner / passes, larger(kLanes / passes, 1)};
  for (int64_t column = begin; column < end; column += span) {
    const int64_t stop = smaller(column + span, end);
    int64_t row = 0;
    for (; row + kTileHeight <= l.rows; row += kTileHeight) linear_columns<kTileHeight, T>(l, row, column, stop, ahead);
    switch (l.rows - row) {
      case 1: linear_columns<1, T>(l, row, column, stop, ahead); break;
      case 2: linear_columns<2, T>(l, row, column, stop, ahead); break;
      case 3: linear_columns<3, T>(l, row, column, stop, ahead); break;
    }
  }
}

// Panels.

constexpr int64_t kPanelRows = 16;
constexpr int64_t kPassRows = 64;     // that share a weight once it is near
constexpr int64_t kPassColumns = 24;  // a multiple of kPanelColumns
constexpr int64_t kPanelColumns = 6;
constexpr int64_t kChain = 128;      // products that one accumulator sums
constexpr int64_t kLineFloats = 16;  // of a cache line
static_assert(kPassRows % kPanelRows == 0 && kPanelRows % 8 == 0 && kPanelRows % kLanes == 0);
static_assert(kPassColumns % kPanelColumns == 0 && kPassColumns % 8 == 0);

// Of all panels; zero where tiles serve.
int64_t panel_floats(const Linear& l) {
  if (!kPanels || l.type != Type::kFloat || l.rows <= kTiledRows) return 0;
  return (l.rows + kPanelRows - 1) / kPanelRows * kPanelRows * l.inner;
}

// The panel of rows `row` .. within [panel, inner, row]. Absent rows repeat the last.
void pack(const Linear& l, int64_t row, float* panels) {
  for (int64_t part = 0; part < kPanelRows; part += 8) {
    const float* rows[8];
    for (int64_t i = 0; i < 8; i++) rows[i] = l.x + smaller(row + part + i, l.rows - 1) * l.x_stride;
    float* to = panels + row * l.inner + part;
    int64_t k = 0;
    for (; k + 8 <= l.inner; k += 8) {
      Vec8 eight[8];
      turn(rows, k, eight);
      for (int i = 0; i < 8; i++) memcpy(to + (k + i) * kPanelRows, &eight[i], sizeof eight[i]);
    }
    for (; k < l.inner; k++)
      for (int i = 0; i < 8; i++) to[k * kPanelRows + i] = rows[i][k];
  }
}

// Puts a chain of a panel's rows with a pass's weights to the totals; for the first panel, each tile prefetches the
// weights of the next one, after the last those of the next chain: memory does not rest while it multiplies.
INLINE void panel_chain(const float* x, const float* const* weights, int64_t columns, int64_t count, bool fetches,
                        float* totals) {
  constexpr int kVectors = kPanelRows / kLanes;
  for (int64_t column = 0; column < columns; column += kPanelColumns) {
    const float* const* w = weights + column;
    const bool ends = column + kPanelColumns >= columns;
    const float* const* next = ends ? weights : w + kPanelColumns;
    Vec acc[kPanelColumns][kVectors] = {};
    for (int64_t k = 0; k < count;) {
      if (fetches)
        for (int j = 0; j < kPanelColumns; j++) __builtin_prefetch(next[j] + (ends ? count : 0) + k);
      for (const int64_t stop = smaller(k + kLineFloats, count); k < stop; k++) {
        Vec rows[kVectors];
        for (int v = 0; v < kVectors; v++) rows[v] = load(x + (k * kVectors + v) * kLanes);
        for (int j = 0; j < kPanelColumns; j++) {
          const Vec weight = broadcast(w[j][k]);
          for (int v = 0; v < kVectors; v++) acc[j][v] += rows[v] * weight;
        }
      }
    }
    for (int j = 0; j < kPanelColumns; j++)
      for (int v = 0; v < kVectors; v++) {
        float* total = totals + (column + j) * kPassRows + v * kLanes;
        store(total, load(total) + acc[j][v]);
      }
  }
}

// Up to kPassRows rows from `first` on, where a panel begins, and up to kPassColumns columns.
INLINE void panel_pass(const Linear& l, int64_t first, int64_t last, int64_t begin, int64_t end) {
  float totals[kPassColumns * kPassRows] = {};
  for (int64_t chain = 0; chain < l.inner; chain += kChain) {
    const int64_t count = smaller(kChain, l.inner - chain);
    const float* weights[kPassColumns];  // beyond the end: the last column's
    for (int64_t j = 0; j < kPassColumns; j++)
      weights[j] = weights_of<float>(l, smaller(begin + j, end - 1)) + chain;
    for (int64_t row = first; row < last; row += kPanelRows) {
      const float* x = l.panels + row * l.inner + chain * kPanelRows;
      panel_chain(x, weights, end - begin, count, row == first, totals + (row - first));
    }
  }
  for (int64_t column = begin; column < end; column += 8)
    for (int64_t row = first; row < last; row += 8) {
      const float* columns[8];
      for (int64_t j = 0; j < 8; j++) columns[j] = totals + ((column - begin + j) * kPassRows + row - first);
      Vec8 turned[8];
      turn(columns, 0, turned);
      for (int64_t i = 0; i < smaller(8, last - row); i++) {
        float sums[8];
        memcpy(sums, &turned[i], sizeof sums);
        if (column + 8 <= end)
          write_sums<float>(l, row + i, column, 8, sums);  // of a known count: vectors
        else
          write_sums<float>(l, row + i, column, end - column, sums);
      }
    }
}

// Rows first .. last, of tiles all, and columns begin .. end of the result.
void linear(const Linear& l, int64_t first, int64_t last, int64_t begin, int64_t end) {
  if (l.panels) {
    for (int64_t row = first; row < last; row += kPassRows)
      for (int64_t column = begin; column < end; column += kPassColumns)
        panel_pass(l, row, smaller(row + kPassRows, last), column, smaller(column + kPassColumns, end));
  } else if (l.type == Type::kFloat) {
    tiled<float>(l, begin, end);
  } else {
    tiled<BFloat16>(l, begin, end);
  }
}

}  // namespace
}  // namespace sglang_dflash
