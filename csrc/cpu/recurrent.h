// Causal convolution, gated delta rule and gated norm of layers with recurrent state, for one instruction set. A row's
// bits depend on its request's rows up to it alone: not on how the rows are cut into forwards, threads or blocks.
#pragma once

#include "rows.h"

namespace sglang_dflash {
namespace {

INLINE Vec sigmoid(Vec x) {
  const Vec e = exp_negative(x > 0 ? -x : x);
  return (x > 0 ? broadcast(1.0f) : e) / (e + 1.0f);
}

template <typename W>
INLINE float weight_at(const void* p, int64_t i) {
  return wide(static_cast<const W*>(p)[i]);
}

INLINE float any_at(const void* p, Type type, int64_t i) {
  return type == Type::kFloat ? weight_at<float>(p, i) : weight_at<BFloat16>(p, i);
}

// kLanes channels: their weights and their last inputs are columns of vectors.
template <typename T, typename S>
void conv_lanes(const Conv& c, const ConvItem& item, int64_t channel, int64_t count) {
  const int64_t keep = c.taps - 1;
  Vec weight[kMaxTaps], past[kMaxTaps], bias = {};
  for (int64_t tap = 0; tap < c.taps; tap++) {
    float column[kLanes] = {};
    for (int64_t i = 0; i < count; i++)
      column[i] = any_at(c.weight, c.weight_type, (channel + i) * c.weight_stride + tap);
    weight[tap] = load(column);
  }
  if (c.bias) {
    float column[kLanes] = {};
    for (int64_t i = 0; i < count; i++) column[i] = any_at(c.bias, c.weight_type, channel + i);
    bias = load(column);
  }
  for (int64_t tap = 0; tap < keep; tap++) {
    float column[kLanes] = {};
    if (item.before)
      for (int64_t i = 0; i < count; i++)
        column[i] = wide(static_cast<const S*>(item.before)[(channel + i) * item.state_channel + tap * item.state_tap]);
    past[tap] = load(column);
  }
  const auto keep_past = [&](S* to, int64_t channel_stride, int64_t tap_stride) {
    for (int64_t tap = 0; tap < keep; tap++)
      for (int64_t i = 0; i < count; i++) narrow(to + (channel + i) * channel_stride + tap * tap_stride, past[tap][i]);
  };
  for (int64_t row = 0; row < item.rows; row++) {
    if (item.snapshot && row == item.snapshot_row)
      keep_past(static_cast<S*>(item.snapshot), item.state_channel, item.state_tap);
    Vec x = read(row_of<T>(c.x, item.first_row + row) + channel, count);
    Vec total = bias;
    for (int64_t tap = 0; tap < keep; tap++) total += weight[tap] * past[tap];
    total += weight[keep] * x;
    put(row_of<T>(c.out, item.first_row + row) + channel, total * sigmoid(total), count);
    if (item.windows) {  // later rows read what the pool would have kept
      S stored[kLanes];
      store(stored, x);
      x = load(stored);
    }
    for (int64_t tap = 0; tap + 1 < keep; tap++) past[tap] = past[tap + 1];
    if (keep > 0) past[keep - 1] = x;
    if (item.windows)
      keep_past(static_cast<S*>(item.windows) + row * item.window_row, item.window_channel, item.window_tap);
  }
  if (item.snapshot && item.rows == item.snapshot_row)
    keep_past(static_cast<S*>(item.snapshot), item.state_channel, item.state_tap);
  if (item.after) keep_past(static_cast<S*>(item.after), item.state_channel, item.state_tap);
}

void conv(const Conv& c, const ConvItem& item, int64_t begin, int64_t end) {
  const bool wide_x = c.x.type == Type::kFloat, wide_state = c.state_type == Type::kFloat;
  for (int64_t channel = begin; channel < end; channel += kLanes) {
    const int64_t count = smaller(kLanes, end - channel);
    if (wide_x) wide_state ? conv_lanes<float, float>(c, item, channel, count)
                           : conv_lanes<float, BFloat16>(c, item, channel, count);
    else wide_state ? conv_lanes<BFloat16, float>(c, item, channel, count)
                    : conv_lanes<BFloat16, BFloat16>(c, item, channel, count);
  }
}

constexpr float kL2Eps = 1e-6f;

// Normalises the first `size` elements of `in`, times `scale`; whole vectors of `out` are written.
template <typename T>
INLINE void l2_norm(const T* in, int64_t size, float scale, float* out) {
  Vec squares = {};
  each_vector(size, [&](int64_t i, int64_t count) {
    const Vec x = read(in + i, count);
    squares += x * x;
    store(out + i, x);
  });
  const float factor = scale / __builtin_sqrtf(sum(squares) + kL2Eps);
  for (int64_t i = 0; i < size; i += kLanes) store(out + i, load(out + i) * factor);
}

template <typename S>
INLINE void copy_state(const float* state, int64_t stride, S* to, const Delta& d, const DeltaItem& item) {
  for (int64_t v = item.v_begin; v < item.v_end; v++)
    each_vector(d.k_dim, [&](int64_t i, int64_t count) {
      put(to + v * d.k_dim + i, load(state + (v - item.v_begin) * stride + i), count);
    });
}

template <typename T, typename S>
void delta_rows(const Delta& d, const DeltaItem& item) {
  const int64_t keys = d.k_dim, stride = (keys + kLanes - 1) / kLanes * kLanes, values = item.v_end - item.v_begin;
  alignas(64) float state[kStateRows * kMaxKeys], q[kMaxKeys], k[kMaxKeys], decay[kMaxKeys], decayed_k[kMaxKeys];
  for (int64_t v = 0; v < kStateRows; v++)
    for (int64_t i = 0; i < stride; i += kLanes) {
      Vec x = {};
      if (item.before && v < values)
        x = read(static_cast<const S*>(item.before) + (item.v_begin + v) * keys + i, smaller(kLanes, keys - i));
      store(state + v * stride + i, x);
    }
  const int64_t k_head = item.head / (d.heads / d.k_heads);
  const float scale = 1.0f / __builtin_sqrtf(float(keys));
  for (int64_t row = 0; row < item.rows; row++) {
    if (item.snapshot && row == item.snapshot_row) copy_state(state, stride, static_cast<S*>(item.snapshot), d, item);
    const int64_t token = item.first_row + row, gate = token * d.heads + item.head;
    const T* all = row_of<T>(d.qkv, token);
    l2_norm(all + k_head * keys, keys, scale, q);
    l2_norm(all + (d.k_heads + k_head) * keys, keys, 1.0f, k);
    const T* v_in = all + 2 * d.k_heads * keys + item.head * d.v_dim + item.v_begin;
    const float one_decay = d.per_key ? 0.0f : exp_negative(d.g[gate]);
    for (int64_t i = 0; i < stride; i += kLanes) {
      const Vec x = d.per_key ? exp_negative(read(d.g + gate * keys + i, smaller(kLanes, keys - i)))
                              : broadcast(one_decay);
      store(decay + i, x);
      store(decayed_k + i, x * load(k + i));
    }
    const float beta = d.beta[gate];
    T* out = row_of<T>(d.out, token, item.head) + item.v_begin;
    for (int64_t v = 0; v < values; v += 4) {
      float* rows[4] = {state + v * stride, state + (v + 1) * stride, state + (v + 2) * stride,
                        state + (v + 3) * stride};
      Vec seen[4] = {}, read_out[4] = {};
      for (int64_t i = 0; i < stride; i += kLanes) {
        const Vec key = load(decayed_k + i);
        for (int j = 0; j < 4; j++) seen[j] += load(rows[j] + i) * key;
      }
      const Vec4 predicted = sums(seen[0], seen[1], seen[2], seen[3]);
      Vec update[4];
      for (int j = 0; j < 4; j++)
        update[j] = broadcast(v + j < values ? beta * (wide(v_in[v + j]) - predicted[j]) : 0.0f);
      for (int64_t i = 0; i < stride; i += kLanes) {
        const Vec key = load(k + i), query = load(q + i), fade = load(decay + i);
        for (int j = 0; j < 4; j++) {
          const Vec next = load(rows[j] + i) * fade + update[j] * key;
          store(rows[j] + i, next);
          read_out[j] += next * query;
        }
      }
      const Vec4 result = sums(read_out[0], read_out[1], read_out[2], read_out[3]);
      for (int64_t j = 0; j < 4 && v + j < values; j++) narrow(out + v + j, result[j]);
    }
    if (item.scratch) {
      S* stored = static_cast<S*>(item.scratch) + row * item.scratch_row;
      copy_state(state, stride, stored, d, item);
      if (sizeof(S) < sizeof(float))  // the next row reads what the pool would have kept
        for (int64_t v = 0; v < values; v++)
          each_vector(keys, [&](int64_t i, int64_t count) {
            store(state + v * stride + i, read(stored + (item.v_begin + v) * keys + i, count));
          });
    }
  }
  if (item.snapshot && item.rows == item.snapshot_row)
    copy_state(state, stride, static_cast<S*>(item.snapshot), d, item);
  if (item.after) copy_state(state, stride, static_cast<S*>(item.after), d, item);
}

void delta(const Delta& d, const DeltaItem& item) {
  const bool wide_state = d.state_type == Type::kFloat;
  if (d.qkv.type == Type::kFloat) wide_state ? delta_rows<float, float>(d, item) : delta_rows<float, BFloat16>(d, item);
  else wide_state ? delta_rows<BFloat16, float>(d, item) : delta_rows<BFloat16, BFloat16>(d, item);
}

template <typename T>
void gated_norm_row(const GatedNorm& n, int64_t token, int64_t head) {
  const T *x = row_of<T>(n.x, token, head), *gate = row_of<T>(n.gate, token, head);
  T* out = row_of<T>(n.out, token, head);
  Vec squares = {};
  each_vector(n.size, [&](int64_t i, int64_t count) {
    const Vec value = read(x + i, count);
    squares += value * value;
  });
  const float scale = scale_of(squares, n.size, n.eps);
  each_vector(n.size, [&](int64_t i, int64_t count) {
    const Vec z = read(gate + i, count);
    const Vec weight = n.weight_type == Type::kFloat ? read(static_cast<const float*>(n.weight) + i, count)
                                                     : read(static_cast<const BFloat16*>(n.weight) + i, count);
    put(out + i, read(x + i, count) * scale * weight * (n.silu ? z * sigmoid(z) : sigmoid(z)), count);
  });
}

void gated_norm(const GatedNorm& n, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++)
    n.x.type == Type::kFloat ? gated_norm_row<float>(n, row / n.heads, row % n.heads)
                             : gated_norm_row<BFloat16>(n, row / n.heads, row % n.heads);
}

}  // namespace
}  // namespace sglang_dflash
