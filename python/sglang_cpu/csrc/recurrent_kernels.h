// Causal convolution, gated delta rule, selective scan and gated norm of layers with recurrent state, for one
// instruction set. A row's bits depend on its request's rows up to it alone: not on how the rows are cut into forwards,
// threads or blocks.
#pragma once

#include "row_kernels.h"

namespace sglang_cpu {
namespace {

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

// The part of a state that an item works on: kStateRows rows of `stride` floats; those behind its values are zero.
template <typename S>
INLINE void load_state(float* state, int64_t stride, int64_t keys, const StateItem& item) {
  for (int64_t v = 0; v < kStateRows; v++)
    for (int64_t i = 0; i < stride; i += kLanes) {
      Vec x = {};
      if (item.before && v < item.v_end - item.v_begin)
        x = read(static_cast<const S*>(item.before) + (item.v_begin + v) * keys + i, smaller(kLanes, keys - i));
      store(state + v * stride + i, x);
    }
}

template <typename S>
INLINE void copy_state(const float* state, int64_t stride, void* to, int64_t keys, const StateItem& item) {
  for (int64_t v = item.v_begin; v < item.v_end; v++)
    each_vector(keys, [&](int64_t i, int64_t count) {
      put(static_cast<S*>(to) + v * keys + i, load(state + (v - item.v_begin) * stride + i), count);
    });
}

template <typename S>
INLINE void begin_row(const float* state, int64_t stride, int64_t row, int64_t keys, const StateItem& item) {
  if (item.snapshot && row == item.snapshot_row) copy_state<S>(state, stride, item.snapshot, keys, item);
}

// In a verification, keeps the state after the row; the next row reads what the pool would have kept.
template <typename S>
INLINE void end_row(float* state, int64_t stride, int64_t row, int64_t keys, const StateItem& item) {
  if (!item.scratch) return;
  S* stored = static_cast<S*>(item.scratch) + row * item.scratch_row;
  copy_state<S>(state, stride, stored, keys, item);
  if (sizeof(S) < sizeof(float))
    for (int64_t v = item.v_begin; v < item.v_end; v++)
      each_vector(keys, [&](int64_t i, int64_t count) {
        store(state + (v - item.v_begin) * stride + i, read(stored + v * keys + i, count));
      });
}

template <typename S>
INLINE void end_rows(const float* state, int64_t stride, int64_t keys, const StateItem& item) {
  begin_row<S>(state, stride, item.rows, keys, item);
  if (item.after) copy_state<S>(state, stride, item.after, keys, item);
}

template <typename T, typename S>
void delta_rows(const Delta& d, const StateItem& item) {
  const int64_t keys = d.k_dim, stride = (keys + kLanes - 1) / kLanes * kLanes, values = item.v_end - item.v_begin;
  alignas(64) float state[kStateRows * kMaxKeys], q[kMaxKeys], k[kMaxKeys], decay[kMaxKeys], decayed_k[kMaxKeys];
  load_state<S>(state, stride, keys, item);
  const int64_t k_head = item.head / (d.heads / d.k_heads);
  const float scale = 1.0f / __builtin_sqrtf(float(keys));
  for (int64_t row = 0; row < item.rows; row++) {
    begin_row<S>(state, stride, row, keys, item);
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
    end_row<S>(state, stride, row, keys, item);
  }
  end_rows<S>(state, stride, keys, item);
}

void delta(const Delta& d, const StateItem& item) {
  const bool wide_state = d.state_type == Type::kFloat;
  if (d.qkv.type == Type::kFloat) wide_state ? delta_rows<float, float>(d, item) : delta_rows<float, BFloat16>(d, item);
  else wide_state ? delta_rows<BFloat16, float>(d, item) : delta_rows<BFloat16, BFloat16>(d, item);
}

template <typename T, typename S>
void scan_rows(const Scan& s, const StateItem& item) {
  const int64_t keys = s.k_dim, stride = (keys + kLanes - 1) / kLanes * kLanes, values = item.v_end - item.v_begin;
  alignas(64) float state[kStateRows * kMaxKeys], b[kMaxKeys], c[kMaxKeys];
  load_state<S>(state, stride, keys, item);
  const int64_t group = item.head / (s.heads / s.groups);
  const Vec skip = broadcast(s.skip[item.head]);
  for (int64_t row = 0; row < item.rows; row++) {
    begin_row<S>(state, stride, row, keys, item);
    const int64_t token = item.first_row + row, gate = token * s.heads + item.head;
    const T *all = row_of<T>(s.xbc, token), *of_groups = all + s.heads * s.v_dim + group * keys;
    for (int64_t i = 0; i < stride; i += kLanes) {
      store(b + i, read(of_groups + i, smaller(kLanes, keys - i)));
      store(c + i, read(of_groups + s.groups * keys + i, smaller(kLanes, keys - i)));
    }
    const T* x_in = all + item.head * s.v_dim + item.v_begin;
    const Vec fade = broadcast(s.decay[gate]);
    T* out = row_of<T>(s.out, token, item.head) + item.v_begin;
    for (int64_t v = 0; v < values; v += 4) {
      float* rows[4] = {state + v * stride, state + (v + 1) * stride, state + (v + 2) * stride,
                        state + (v + 3) * stride};
      Vec update[4], read_out[4] = {};
      Vec4 x = {};
      for (int64_t j = 0; j < 4 && v + j < values; j++) x[j] = wide(x_in[v + j]);
      for (int j = 0; j < 4; j++) update[j] = broadcast(s.step[gate] * x[j]);
      for (int64_t i = 0; i < stride; i += kLanes) {
        const Vec key = load(b + i), query = load(c + i);
        for (int j = 0; j < 4; j++) {
          const Vec next = load(rows[j] + i) * fade + update[j] * key;
          store(rows[j] + i, next);
          read_out[j] += next * query;
        }
      }
      const Vec4 result = sums(read_out[0], read_out[1], read_out[2], read_out[3]) + x * skip[0];
      for (int64_t j = 0; j < 4 && v + j < values; j++) narrow(out + v + j, result[j]);
    }
    end_row<S>(state, stride, row, keys, item);
  }
  end_rows<S>(state, stride, keys, item);
}

void scan(const Scan& s, const StateItem& item) {
  const bool wide_state = s.state_type == Type::kFloat;
  if (s.xbc.type == Type::kFloat) wide_state ? scan_rows<float, float>(s, item) : scan_rows<float, BFloat16>(s, item);
  else wide_state ? scan_rows<BFloat16, float>(s, item) : scan_rows<BFloat16, BFloat16>(s, item);
}

template <typename T>
void gated_norm_row(const GatedNorm& n, int64_t token, int64_t head) {
  const T *x = row_of<T>(n.x, token, head), *gate = row_of<T>(n.gate, token, head);
  T* out = row_of<T>(n.out, token, head);
  const int64_t shift = head * n.weight_stride;
  const auto opened = [&](int64_t i, int64_t count) {
    const Vec z = read(gate + i, count);
    return n.silu ? z * sigmoid(z) : sigmoid(z);
  };
  Vec squares = {};
  each_vector(n.size, [&](int64_t i, int64_t count) {
    Vec value = read(x + i, count);
    if (n.gate_first) value *= opened(i, count);
    squares += value * value;
  });
  const float scale = scale_of(squares, n.size, n.eps);
  each_vector(n.size, [&](int64_t i, int64_t count) {
    const Vec weight = n.weight_type == Type::kFloat ? read(static_cast<const float*>(n.weight) + shift + i, count)
                                                     : read(static_cast<const BFloat16*>(n.weight) + shift + i, count);
    put(out + i, read(x + i, count) * scale * weight * opened(i, count), count);
  });
}

void gated_norm(const GatedNorm& n, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++)
    n.x.type == Type::kFloat ? gated_norm_row<float>(n, row / n.heads, row % n.heads)
                             : gated_norm_row<BFloat16>(n, row / n.heads, row % n.heads);
}

}  // namespace
}  // namespace sglang_cpu
