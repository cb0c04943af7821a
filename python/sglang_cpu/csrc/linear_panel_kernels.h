// Products of many rows. A panel lays 16 or 32 rows side by side, so that a vector holds one number of each row.
//
// A tile (linear_kernels.h) sums each lane of the inner dimension apart. Then it folds the lanes, which takes shuffles.
// A panel takes the lanes one after the other and folds them without shuffles. It adds the same numbers in the same
// order, so its bits are those of a tile. Only the AVX-512 unit has panels.
#pragma once

#include "vec.h"

namespace sglang_cpu {
namespace {

#if defined(__AVX512F__)

constexpr int kPanelVectors = 2;        // vectors of rows that share a broadcast weight
constexpr int kPanelColumns = 8;        // with kPanelVectors, 16 accumulators
constexpr int64_t kPanelSteps = 32;     // vectors of a weight's row that stay in the L1 cache for all rows
constexpr int64_t kPanelPass = 128;     // rows that share such weights
constexpr int64_t kPanelLeast = 9;      // rows that are worth a panel of 16, beside others
constexpr int64_t kPanelShort = 64;     // inner dimension below which tiles serve any number of rows
constexpr int64_t kPanelLong = 1024;    // inner dimension from which a tile's weights do not fit the L1 cache
constexpr int64_t kPanelHeight = kPanelVectors * kLanes;
constexpr int64_t kPanelArea = kPanelColumns * kPanelHeight;  // sums of a block of columns and a panel
static_assert(kColumnUnit % kPanelColumns == 0, "a work item has whole blocks of columns");
static_assert(kLanes == kMostLanes, "linear_op.cpp pads rows and inner dimension to a panel's lanes");

INLINE int64_t steps_of(int64_t inner) { return (inner + kLanes - 1) / kLanes; }

// The first rows of a product, which panels compute; the last vector of rows may be filled up. Tiles are faster for few
// rows: packing them, and copying weights, costs the same for any number.
int64_t panel_rows(const Linear& l) {
  const int64_t least = l.type == Type::kBFloat16 || l.inner >= kPanelLong ? 32 : 64;
  if (l.inner < kPanelShort || l.rows < least) return 0;
  return l.rows % kLanes < kPanelLeast ? l.rows / kLanes * kLanes : l.rows;
}

// Transposes 16 vectors. Element (i, j) has the number 16 i + j; each round rotates the 8 bits of the numbers by one.
INLINE void transpose(Vec* x) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int round = 0; round < 4; round++) {
    Vec y[kLanes];
    for (int i = 0; i < kLanes / 2; i++) {
      y[2 * i] = (Vec)_mm512_permutex2var_ps((__m512)x[i], low, (__m512)x[i + kLanes / 2]);
      y[2 * i + 1] = (Vec)_mm512_permutex2var_ps((__m512)x[i], high, (__m512)x[i + kLanes / 2]);
    }
    for (int i = 0; i < kLanes; i++) x[i] = y[i];
  }
}

// Writes the rows of `l` as panels: [panel][lane][step][row], zeros beyond the rows and the inner dimension.
void pack_panels(const Linear& l, float* panels) {
  const int64_t steps = steps_of(l.inner);
  for (int64_t row = 0; row < l.rows; row += kLanes) {
    const int64_t start = row / kPanelHeight * kPanelHeight;
    const int64_t height = smaller(kPanelHeight, (l.rows - start + kLanes - 1) / kLanes * kLanes);
    float* to = panels + start * steps * kLanes + row - start;
    for (int64_t step = 0; step < steps; step++) {
      const int64_t left = l.inner - step * kLanes;
      Vec x[kLanes] = {};
      for (int64_t i = 0; i < smaller(kLanes, l.rows - row); i++) {
        const float* from = l.x + (row + i) * l.x_stride + step * kLanes;
        x[i] = left >= kLanes ? load(from) : load_some(from, left);
      }
      transpose(x);
      for (int lane = 0; lane < kLanes; lane++) store(to + (lane * steps + step) * height, x[lane]);
    }
  }
}

// Weights of kPanelColumns columns: at[c * column + s * step] is the first lane of column c and step s.
struct Weights {
  const float* at;
  int64_t column, step;
};

// Where the sums of a panel go. `parts` holds those of each lane between two blocks of steps.
struct Sums {
  float* parts;   // [lane][kPanelArea]
  float* folded;  // [4][kPanelArea], while the lanes are folded
  float* out;     // [kPanelColumns][kPanelPass]
  bool first, last;  // block of steps
};

// Lane i of a round in the order in which a fold adds lanes: the bits of i, reversed.
INLINE int folding_order(int i) { return (i & 1) << 3 | (i & 2) << 1 | (i & 4) >> 1 | (i & 8) >> 3; }

// Adds `steps` steps to the sums of a panel of VECTORS vectors. x is its part of the packed rows, [lane][all][row].
// After the last step it folds the lanes in pairs like `fold` and `sum` (vec.h), as soon as both halves are there.
// While it multiplies, it prefetches the next weights into the L2 cache (`next` is null for all panels but one).
template <int VECTORS, typename T>
INLINE void add_panel(const float* x, int64_t all, const Weights& w, int64_t steps, const Sums& sums, const T* next,
                      int64_t next_stride) {
  constexpr int64_t kHeight = VECTORS * kLanes;
  for (int i = 0; i < kLanes; i++) {
    const int lane = folding_order(i);
    float* to = sums.parts + lane * kPanelArea;
    Vec acc[kPanelColumns][VECTORS] = {};
    if (!sums.first)
      for (int c = 0; c < kPanelColumns; c++)
        for (int v = 0; v < VECTORS; v++) acc[c][v] = load(to + c * kHeight + v * kLanes);
    if (next)
      for (int c = 0; c < kPanelColumns; c++)
        for (int64_t s = i * steps / kLanes; s < (i + 1) * steps / kLanes; s++)
          __builtin_prefetch(next + c * next_stride + s * kLanes, 0, 2);
    const float* from = x + lane * all * kHeight;
    const float *near = w.at + lane, *far = near + kPanelColumns / 2 * w.column;
    for (int64_t s = 0; s < steps; s++, from += kHeight, near += w.step, far += w.step) {
      Vec value[VECTORS];
      for (int v = 0; v < VECTORS; v++) value[v] = load(from + v * kLanes);
      for (int c = 0; c < kPanelColumns; c++) {
        const int64_t half = c % (kPanelColumns / 2) * w.column;
        const Vec weight = broadcast(c < kPanelColumns / 2 ? near[half] : far[half]);
        for (int v = 0; v < VECTORS; v++) acc[c][v] += value[v] * weight;
      }
    }
    int64_t stride = kHeight;
    if (sums.last) {
      to = sums.folded;
      for (int pairs = i; pairs & 1; pairs >>= 1, to += kPanelArea)
        for (int c = 0; c < kPanelColumns; c++)
          for (int v = 0; v < VECTORS; v++) acc[c][v] += load(to + c * kHeight + v * kLanes);
      if (i == kLanes - 1) {
        to = sums.out;
        stride = kPanelPass;
      }
    }
    for (int c = 0; c < kPanelColumns; c++)
      for (int v = 0; v < VECTORS; v++) store(to + c * stride + v * kLanes, acc[c][v]);
  }
}

// Copies a block of weights as float32: [step][column][lane], zeros beyond `columns` and the inner dimension.
template <typename T>
INLINE Weights copied(const T* from, int64_t stride, int64_t columns, int64_t steps, int64_t inner, float* to) {
  for (int c = 0; c < kPanelColumns; c++)
    for (int64_t s = 0; s < steps; s++) {
      const T* at = from + c * stride + s * kLanes;
      const int64_t left = inner - s * kLanes;
      store(to + (s * kPanelColumns + c) * kLanes,
            c >= columns ? Vec{} : left >= kLanes ? load(at) : load_some(at, left));
    }
  return {to, kLanes, kPanelColumns * kLanes};
}

// Float32 weights are read where they are, unless a column or the end of a sum has to be filled up.
INLINE Weights weights_of(const float* from, int64_t stride, int64_t columns, int64_t steps, int64_t inner, float* to) {
  const bool whole = columns == kPanelColumns && inner >= steps * kLanes;
  return whole ? Weights{from, stride, kLanes} : copied(from, stride, columns, steps, inner, to);
}

// Others are widened once for all rows of a pass.
INLINE Weights weights_of(const BFloat16* from, int64_t stride, int64_t columns, int64_t steps, int64_t inner,
                          float* to) {
  return copied(from, stride, columns, steps, inner, to);
}

template <typename T>
INLINE void store_sums(const Linear& l, const float* sums, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  for (int64_t i = 0; i < rows; i++, sums++) {
    T* out = static_cast<T*>(l.out) + (row + i) * l.out_stride + column;
    if (l.addend) {
      const T* addend = static_cast<const T*>(l.addend) + (row + i) * l.addend_stride + column;
      for (int64_t c = 0; c < columns; c++) narrow(out + c, sums[c * kPanelPass] + wide(addend[c]));
    } else {
      for (int64_t c = 0; c < columns; c++) narrow(out + c, sums[c * kPanelPass]);
    }
  }
}

// Computes columns begin .. end - 1 of all rows of `l`, whose x is packed in l.panels.
template <typename T>
void panels_of(const Linear& l, int64_t begin, int64_t end) {
  alignas(64) float weights[kPanelSteps * kPanelColumns * kLanes];
  alignas(64) float parts[kPanelPass / kPanelHeight][kLanes * kPanelArea], folded[4 * kPanelArea];
  alignas(64) float sums[kPanelColumns * kPanelPass];
  const int64_t all = steps_of(l.inner);
  for (int64_t first = 0; first < l.rows; first += kPanelPass) {
    const int64_t rows = smaller(kPanelPass, l.rows - first);
    for (int64_t column = begin; column < end; column += kPanelColumns) {
      const int64_t columns = smaller(kPanelColumns, end - column);
      const T* weight = static_cast<const T*>(l.weight) + column * l.weight_stride;
      for (int64_t step = 0; step < all; step += kPanelSteps) {
        const int64_t steps = smaller(kPanelSteps, all - step), inner = l.inner - step * kLanes;
        const bool last = step + steps == all;
        const Weights w = weights_of(weight + step * kLanes, l.weight_stride, columns, steps, inner, weights);
        const T* next = last ? weight + kPanelColumns * l.weight_stride : weight + (step + steps) * kLanes;
        for (int64_t row = 0; row < rows; row += kPanelHeight) {
          const float* x = l.panels + (first + row) * all * kLanes;
          const Sums to{parts[row / kPanelHeight], folded, sums + row, step == 0, last};
          if (rows - row > kLanes)
            add_panel<2, T>(x + step * 2 * kLanes, all, w, steps, to, row ? nullptr : next, l.weight_stride);
          else
            add_panel<1, T>(x + step * kLanes, all, w, steps, to, row ? nullptr : next, l.weight_stride);
        }
      }
      store_sums<T>(l, sums, first, rows, column, columns);
    }
  }
}

#else

int64_t panel_rows(const Linear&) { return 0; }
void pack_panels(const Linear&, float*) {}
template <typename T>
void panels_of(const Linear&, int64_t, int64_t) {}

#endif

}  // namespace
}  // namespace sglang_cpu
