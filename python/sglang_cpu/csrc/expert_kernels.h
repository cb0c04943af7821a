// What a mixture of experts computes beside its products: activations, and the weighted sums of the experts' outputs.
#pragma once

#include "row_kernels.h"

namespace sglang_cpu {
namespace {

// GELU's tanh form, x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), is x sigmoid(2 u).
template <Activation A>
INLINE Vec activated(Vec x) {
  if constexpr (A == Activation::kSilu) return x * sigmoid(x);
  if constexpr (A == Activation::kGelu) return x * sigmoid((x + 0.044715f * x * x * x) * 1.5957691216057308f);
  const Vec positive = x < 0 ? Vec{} : x;  // NaN stays
  return positive * positive;
}

template <Activation A, typename T>
void activate_columns(const Activated& a, int64_t row, int64_t begin, int64_t end) {
  const T* in = static_cast<const T*>(a.in) + row * a.in_stride + begin;
  float* out = a.out + row * a.size + begin;
  each_vector(end - begin, [&](int64_t i, int64_t count) {
    const Vec value = activated<A>(read(in + i, count));
    put(out + i, A == Activation::kSquaredRelu ? value : value * read(in + a.size + i, count), count);
  });
}

template <typename T>
void activate_of(const Activated& a, int64_t row, int64_t begin, int64_t end) {
  switch (a.activation) {
    case Activation::kSilu: return activate_columns<Activation::kSilu, T>(a, row, begin, end);
    case Activation::kGelu: return activate_columns<Activation::kGelu, T>(a, row, begin, end);
    case Activation::kSquaredRelu: return activate_columns<Activation::kSquaredRelu, T>(a, row, begin, end);
  }
}

void activate(const Activated& a, int64_t row, int64_t begin, int64_t end) {
  a.type == Type::kFloat ? activate_of<float>(a, row, begin, end) : activate_of<BFloat16>(a, row, begin, end);
}

template <typename T>
void weighted_sum_of(const Weighted& w, int64_t begin, int64_t end) {
  const T* in = static_cast<const T*>(w.in);
  for (int64_t row = begin; row < end; row++) {
    const float* weights = w.weights + row * w.count;
    const int64_t* places = w.places + row * w.count;
    T* out = static_cast<T*>(w.out) + row * w.size;
    each_vector(w.size, [&](int64_t i, int64_t count) {
      Vec total = {};
      for (int64_t k = 0; k < w.count; k++)
        if (places[k] >= 0) total += read(in + places[k] * w.size + i, count) * weights[k];
      put(out + i, total, count);
    });
  }
}

void weighted_sum(const Weighted& w, int64_t begin, int64_t end) {
  w.type == Type::kFloat ? weighted_sum_of<float>(w, begin, end) : weighted_sum_of<BFloat16>(w, begin, end);
}

}  // namespace
}  // namespace sglang_cpu
