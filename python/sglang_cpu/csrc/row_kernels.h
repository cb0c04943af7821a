// Norms, rotary embedding, argmax and best candidates of rows, for one instruction set. All sums are in float.
#pragma once

#include "vec.h"

namespace sglang_cpu {
namespace {

template <typename T>
INLINE T* row_of(const View& view, int64_t outer, int64_t inner = 0) {
  return static_cast<T*>(view.data) + outer * view.outer + inner * view.inner;
}

// Calls `body(i, count)` for each vector of `size` elements; the last one may be partial.
template <typename Body>
INLINE void each_vector(int64_t size, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, int64_t(kLanes));
  if (i < size) body(i, size - i);
}

template <typename T>
INLINE Vec read(const T* p, int64_t count) {
  return count == kLanes ? load(p) : load_some(p, count);
}

template <typename T>
INLINE void put(T* p, Vec x, int64_t count) {
  count == kLanes ? store(p, x) : store_some(p, x, count);
}

INLINE float scale_of(Vec squares, int64_t size, float eps) {
  return 1.0f / __builtin_sqrtf(sum(squares) / float(size) + eps);
}

template <typename T, typename W>
void norm_row(const Norm& n, int64_t row) {
  const T* x = row_of<T>(n.x, row);
  const T* residual = n.residual.data ? row_of<T>(n.residual, row) : nullptr;
  T* residual_out = n.residual.data ? row_of<T>(n.residual_out, row) : nullptr;
  const W* weight = static_cast<const W*>(n.weight);
  T* out = row_of<T>(n.out, row);
  Vec squares = {};
  each_vector(n.size, [&](int64_t i, int64_t count) {
    Vec value = read(x + i, count);
    if (residual) {
      value += read(residual + i, count);
      put(residual_out + i, value, count);
    }
    squares += value * value;
  });
  const float scale = scale_of(squares, n.size, n.eps);
  each_vector(n.size, [&](int64_t i, int64_t count) {
    Vec value = read(x + i, count);
    if (residual) value += read(residual + i, count);  // not the written sum, which is rounded
    put(out + i, value * scale * read(weight + i, count), count);
  });
}

void norm(const Norm& n, int64_t begin, int64_t end) {
  const bool wide_x = n.x.type == Type::kFloat, wide_weight = n.weight_type == Type::kFloat;
  for (int64_t row = begin; row < end; row++) {
    if (wide_x) wide_weight ? norm_row<float, float>(n, row) : norm_row<float, BFloat16>(n, row);
    else wide_weight ? norm_row<BFloat16, float>(n, row) : norm_row<BFloat16, BFloat16>(n, row);
  }
}

static_assert(kMaxHead % kMostLanes == 0, "a head's buffer holds whole vectors");

template <typename T, typename W, typename C>
void norm_rope_row(const Heads& h, int64_t row, int64_t position) {
  const C* cos = static_cast<const C*>(h.cos_sin) + position * h.cos_sin_stride;
  const int64_t half = h.rotary_dim / 2;
  const C* sin = cos + half;
  for (int64_t head = 0; head < h.heads; head++) {
    T* out = row_of<T>(h.x, row, head);
    float x[kMaxHead];
    Vec squares = {};
    each_vector(h.dim, [&](int64_t i, int64_t count) {
      const Vec value = read(out + i, count);
      squares += value * value;
      put(x + i, value, count);
    });
    if (h.weight) {
      const float scale = scale_of(squares, h.dim, h.eps);
      const W* weight = static_cast<const W*>(h.weight);
      each_vector(h.dim, [&](int64_t i, int64_t count) {
        put(x + i, read(x + i, count) * scale * read(weight + i, count), count);
      });
    }
    each_vector(half, [&](int64_t i, int64_t count) {
      const Vec c = read(cos + i, count), s = read(sin + i, count);
      const Vec first = read(x + i, count), second = read(x + half + i, count);
      put(out + i, first * c - second * s, count);
      put(out + half + i, second * c + first * s, count);
    });
    for (int64_t i = h.rotary_dim; i < h.dim; i++) narrow(out + i, x[i]);
  }
}

template <typename T, typename W>
INLINE void norm_rope_as(const Heads& h, int64_t row, int64_t position) {
  h.cos_sin_type == Type::kFloat ? norm_rope_row<T, W, float>(h, row, position)
                                 : norm_rope_row<T, W, BFloat16>(h, row, position);
}

void norm_rope(const Heads& h, int64_t row, int64_t position) {
  if (h.x.type == Type::kFloat) {
    h.weight_type == Type::kFloat ? norm_rope_as<float, float>(h, row, position)
                                  : norm_rope_as<float, BFloat16>(h, row, position);
  } else {
    h.weight_type == Type::kFloat ? norm_rope_as<BFloat16, float>(h, row, position)
                                  : norm_rope_as<BFloat16, BFloat16>(h, row, position);
  }
}

constexpr int64_t kScanned = 1024;  // elements of a block, whose largest is compared with the best so far

// The lowest index of the largest value. NaN is larger than all numbers, and the first NaN wins (as in torch.argmax).
template <typename T>
Best first_largest(const T* values, int64_t size) {
  int64_t best_block = 0;
  float best = -kInfinity;
  bool nan = false;
  for (int64_t block = 0; block < size && !nan; block += kScanned) {
    const int64_t end = smaller(block + kScanned, size);
    Vec top[4], strange[4];
    for (int j = 0; j < 4; j++) {
      top[j] = broadcast(-kInfinity);
      strange[j] = Vec{};
    }
    int64_t i = block;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
      for (int j = 0; j < 4; j++) {
        const Vec x = load(values + i + j * kLanes);
        top[j] = x > top[j] ? x : top[j];
        strange[j] = x != x ? x : strange[j];  // a NaN stays
      }
    }
    float largest = -kInfinity;
    for (; i < end; i++) {
      const float x = wide(values[i]);
      largest = x > largest ? x : largest;
      nan |= x != x;
    }
    for (int j = 0; j < 4; j++) {
      const float one = maximum(top[j]), mark = sum(strange[j]);
      largest = one > largest ? one : largest;
      nan |= mark != mark;
    }
    if (nan || largest > best) {
      best = largest;
      best_block = block;
    }
  }
  for (int64_t i = best_block; i < size; i++) {
    const float x = wide(values[i]);
    if (nan ? x != x : x == best) return {x, i};
  }
  return {best, 0};
}

Best argmax(const void* values, Type type, int64_t size) {
  return type == Type::kFloat ? first_largest(static_cast<const float*>(values), size)
                              : first_largest(static_cast<const BFloat16*>(values), size);
}

// Adds `size` columns, whose ids start at `first_id`.
template <typename T>
void add_columns(const T* values, int64_t first_id, int64_t size, Softmax& row) {
  for (int64_t block = 0; block < size; block += kScanned) {
    const int64_t count = smaller(kScanned, size - block);
    float x[kScanned + kLanes];
    Vec largest = broadcast(-kInfinity);
    each_vector(count, [&](int64_t i, int64_t some) {
      Vec one = read(values + block + i, some);
      one = one == one ? one : broadcast(-kInfinity);
      store(x + i, one);
      for (int64_t j = some; j < kLanes; j++) x[i + j] = -kInfinity;
      largest = load(x + i) > largest ? load(x + i) : largest;
    });
    const float best = maximum(largest);
    if (best == -kInfinity) continue;
    if (best > row.value) {
      row.sum = row.value == -kInfinity ? 0 : row.sum * exp_negative(row.value - best);
      row.value = best;
      int64_t place = 0;
      while (x[place] != best) place++;
      row.index = first_id + block + place;
    }
    Vec total = {};
    for (int64_t i = 0; i < count; i += kLanes) total += exp_negative(load(x + i) - row.value);
    row.sum += sum(total);
  }
}

void softmax(const void* values, Type type, int64_t first_id, int64_t size, Softmax& row) {
  type == Type::kFloat ? add_columns(static_cast<const float*>(values), first_id, size, row)
                       : add_columns(static_cast<const BFloat16*>(values), first_id, size, row);
}

}  // namespace
}  // namespace sglang_cpu
