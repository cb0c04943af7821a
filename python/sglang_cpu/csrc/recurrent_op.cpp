// The ops of layers with recurrent state: causal convolution, gates, gated delta rule, selective scan, gated norm.
#include <cmath>

#include "common.h"

namespace sglang_cpu {
namespace {

constexpr int64_t kChannels = 256;  // channels of one work item of a convolution

// The rows of a forward and the places of the requests' states; see `StateRows` in ops/recurrent_reference.py.
struct Rows {
  int64_t batch;
  const int64_t *slots, *starts, *scratch, *snapshot_rows, *snapshot_slots;
  const bool* fresh;
};

const int64_t* optional_ids(const std::optional<at::Tensor>& t, const char* name, int64_t size) {
  return t ? ids_of(*t, name, size) : nullptr;
}

Rows rows_of(const at::Tensor& slots, const at::Tensor& row_starts, const at::Tensor& fresh,
             const std::optional<at::Tensor>& scratch, const std::optional<at::Tensor>& snapshot_rows,
             const std::optional<at::Tensor>& snapshot_slots, int64_t total, int64_t pool) {
  const int64_t batch = slots.numel();
  Rows rows{batch,
            ids_of(slots, "slots", batch),
            ids_of(row_starts, "row_starts", batch + 1),
            optional_ids(scratch, "scratch", batch),
            optional_ids(snapshot_rows, "snapshot_rows", batch),
            optional_ids(snapshot_slots, "snapshot_slots", batch),
            nullptr};
  TORCH_CHECK(fresh.scalar_type() == at::kBool && fresh.is_contiguous() && fresh.numel() == batch, "fresh is ",
              fresh.scalar_type(), fresh.sizes(), "; bool of [", batch, "] is needed");
  rows.fresh = fresh.const_data_ptr<bool>();
  require_below(rows.slots, batch, pool, "slots");
  TORCH_CHECK(rows.starts[0] == 0 && rows.starts[batch] == total, "row_starts go from ", rows.starts[0], " to ",
              rows.starts[batch], "; there are ", total, " rows");
  for (int64_t b = 0; b < batch; b++) {
    TORCH_CHECK(rows.starts[b] <= rows.starts[b + 1], "row_starts fall at ", b);
    if (rows.snapshot_rows && rows.snapshot_rows[b] >= 0) {
      TORCH_CHECK(rows.snapshot_slots, "snapshot_rows without snapshot_slots");
      require_below(rows.snapshot_slots + b, 1, pool, "snapshot_slots");
    }
  }
  return rows;
}

// Checks the scratch of a verification: [P, W, ...], or none.
void check_scratch(const std::optional<at::Tensor>& t, const Rows& rows, const at::Tensor& states, const char* name) {
  TORCH_CHECK(t.has_value() == (rows.scratch != nullptr), name, " and rows.scratch: both or none");
  if (!t) return;
  TORCH_CHECK(t->scalar_type() == states.scalar_type() && t->sizes().slice(2) == states.sizes().slice(1), name, " is ",
              t->scalar_type(), t->sizes(), " and the states are ", states.scalar_type(), states.sizes());
  require_below(rows.scratch, rows.batch, t->size(0), "scratch");
  for (int64_t b = 0; b < rows.batch; b++)
    TORCH_CHECK(rows.starts[b + 1] - rows.starts[b] <= t->size(1), name, " has room for ", t->size(1), " rows, not ",
                rows.starts[b + 1] - rows.starts[b]);
}

// Where a request's state is in a pool or scratch tensor.
template <typename T>
T* place(const at::Tensor& t, int64_t index) {
  return static_cast<T*>(t.data_ptr()) + index * t.stride(0) * t.element_size();
}

// Calls body(item) for each request, head and part of its value dimensions; states are [S, H, V, K].
template <typename F>
void each_state(const Rows& rows, const at::Tensor& states, const std::optional<at::Tensor>& scratch_states, F body) {
  const int64_t heads = states.size(1), v_dim = states.size(2);
  const int64_t parts = (v_dim + kStateRows - 1) / kStateRows;
  const int64_t head_bytes = v_dim * states.size(3) * states.element_size();
  each_item(rows.batch * heads * parts, [&](int64_t work, int64_t) {
    const int64_t b = work / (heads * parts), head = work / parts % heads, part = work % parts;
    StateItem item{};
    item.first_row = rows.starts[b];
    item.rows = rows.starts[b + 1] - rows.starts[b];
    if (item.rows == 0) return;
    item.head = head;
    item.v_begin = part * kStateRows;
    item.v_end = std::min(v_dim, item.v_begin + kStateRows);
    item.before = rows.fresh[b] ? nullptr : place<char>(states, rows.slots[b]) + head * head_bytes;
    if (scratch_states) {
      item.scratch = place<char>(*scratch_states, rows.scratch[b]) + head * head_bytes;
      item.scratch_row = scratch_states->stride(1);
    } else {
      item.after = place<char>(states, rows.slots[b]) + head * head_bytes;
    }
    if (rows.snapshot_rows && rows.snapshot_rows[b] >= 0) {
      item.snapshot = place<char>(states, rows.snapshot_slots[b]) + head * head_bytes;
      item.snapshot_row = rows.snapshot_rows[b];
    }
    body(item);
  });
}

void check_states(const at::Tensor& states, const std::optional<at::Tensor>& scratch_states) {
  TORCH_CHECK(states.dim() == 4 && states[0].is_contiguous() && states.size(3) <= kMaxKeys, "states are ",
              states.sizes(), " with strides ", states.strides(), "; [S, H, V, K], dense in the last three, K up to ",
              kMaxKeys, ", is needed");
  TORCH_CHECK(!scratch_states || scratch_states->size(0) == 0 || (*scratch_states)[0].is_contiguous(),
              "scratch_states must be dense in the last four dimensions");
}

at::Tensor causal_conv(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       const at::Tensor& states, const at::Tensor& slots, const at::Tensor& row_starts,
                       const at::Tensor& fresh, const std::optional<at::Tensor>& scratch,
                       const std::optional<at::Tensor>& snapshot_rows, const std::optional<at::Tensor>& snapshot_slots,
                       const std::optional<at::Tensor>& windows) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && weight.size(0) == x.size(1) && dense(weight) &&
                  weight.size(1) >= 1 && weight.size(1) <= kMaxTaps,
              "x is ", x.sizes(), " and weight ", weight.sizes(), "; [T, C] and [C, 1 to ", kMaxTaps, "] are needed");
  const int64_t channels = x.size(1), taps = weight.size(1);
  TORCH_CHECK(states.dim() == 3 && states.size(1) == channels && states.size(2) == taps - 1,
              "states are ", states.sizes(), "; [S, ", channels, ", ", taps - 1, "] is needed");
  TORCH_CHECK(!bias || (bias->numel() == channels && bias->is_contiguous() &&
                        bias->scalar_type() == weight.scalar_type()), "bias must be [C] in the weight's dtype");
  const Rows rows =
      rows_of(slots, row_starts, fresh, scratch, snapshot_rows, snapshot_slots, x.size(0), states.size(0));
  check_scratch(windows, rows, states, "windows");
  at::Tensor out = unfilled({x.size(0), channels}, x.scalar_type());
  Conv c{};
  c.x = view_of(x, "x");
  c.out = view_of(out, "out");
  c.weight = weight.const_data_ptr();
  c.weight_type = type_of(weight, "weight");
  c.weight_stride = weight.stride(0);
  c.bias = bias ? bias->const_data_ptr() : nullptr;
  c.state_type = type_of(states, "states");
  c.taps = taps;
  const int64_t parts = (channels + kChannels - 1) / kChannels;
  each_item(rows.batch * parts, [&](int64_t work, int64_t) {
    const int64_t b = work / parts, begin = work % parts * kChannels;
    ConvItem item{};
    item.first_row = rows.starts[b];
    item.rows = rows.starts[b + 1] - rows.starts[b];
    if (item.rows == 0) return;
    item.before = rows.fresh[b] ? nullptr : place<char>(states, rows.slots[b]);
    item.state_channel = states.stride(1);
    item.state_tap = states.stride(2);
    if (windows) {
      item.windows = place<char>(*windows, rows.scratch[b]);
      item.window_row = windows->stride(1);
      item.window_channel = windows->stride(2);
      item.window_tap = windows->stride(3);
    } else {
      item.after = place<char>(states, rows.slots[b]);
    }
    if (rows.snapshot_rows && rows.snapshot_rows[b] >= 0) {
      item.snapshot = place<char>(states, rows.snapshot_slots[b]);
      item.snapshot_row = rows.snapshot_rows[b];
    }
    kernels().conv(c, item, begin, std::min(channels, begin + kChannels));
  });
  return out;
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }  // torch's threshold

std::tuple<at::Tensor, at::Tensor> delta_gates(const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_log,
                                               const at::Tensor& dt_bias) {
  TORCH_CHECK((a.dim() == 2 || a.dim() == 3) && b.dim() == 2, "a is ", a.sizes(), " and b ", b.sizes());
  const int64_t rows = a.size(0), heads = a.size(1), keys = a.dim() == 3 ? a.size(2) : 1;
  TORCH_CHECK(b.size(0) == rows && b.size(1) == heads && a_log.numel() == heads && dt_bias.numel() == heads * keys,
              "a is ", a.sizes(), ", b ", b.sizes(), ", a_log ", a_log.sizes(), ", dt_bias ", dt_bias.sizes());
  const at::Tensor wide_a = a.to(at::kFloat).contiguous(), wide_b = b.to(at::kFloat).contiguous();
  const at::Tensor log_rate = a_log.to(at::kFloat).contiguous(), shift = dt_bias.to(at::kFloat).contiguous();
  at::Tensor g = unfilled(a.sizes(), at::kFloat), beta = unfilled({rows, heads}, at::kFloat);
  const float *in_a = wide_a.const_data_ptr<float>(), *in_b = wide_b.const_data_ptr<float>();
  const float *rate = log_rate.const_data_ptr<float>(), *bias = shift.const_data_ptr<float>();
  float *out_g = g.data_ptr<float>(), *out_beta = beta.data_ptr<float>();
  at::parallel_for(0, rows * heads, std::max<int64_t>(1, 1024 / keys), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t head = i % heads;
      const float decay_rate = std::exp(rate[head]);
      for (int64_t key = 0; key < keys; key++)
        out_g[i * keys + key] = -decay_rate * softplus(in_a[i * keys + key] + bias[head * keys + key]);
      out_beta[i] = 1.0f / (1.0f + std::exp(-in_b[i]));
    }
  });
  return {g, beta};
}

at::Tensor delta_rule(const at::Tensor& qkv, const at::Tensor& g, const at::Tensor& beta, int64_t num_k_heads,
                      const at::Tensor& states, const at::Tensor& slots, const at::Tensor& row_starts,
                      const at::Tensor& fresh, const std::optional<at::Tensor>& scratch,
                      const std::optional<at::Tensor>& snapshot_rows, const std::optional<at::Tensor>& snapshot_slots,
                      const std::optional<at::Tensor>& scratch_states) {
  check_states(states, scratch_states);
  const int64_t total = qkv.size(0), heads = states.size(1), v_dim = states.size(2), k_dim = states.size(3);
  TORCH_CHECK(num_k_heads > 0 && heads % num_k_heads == 0, heads, " value heads, ", num_k_heads,
              " key heads; a multiple is needed");
  TORCH_CHECK(qkv.dim() == 2 && qkv.size(1) == 2 * num_k_heads * k_dim + heads * v_dim, "qkv is ", qkv.sizes());
  const bool per_key = g.dim() == 3;
  TORCH_CHECK(g.scalar_type() == at::kFloat && g.is_contiguous() && g.numel() == total * heads * (per_key ? k_dim : 1),
              "g is ", g.scalar_type(), g.sizes());
  TORCH_CHECK(beta.scalar_type() == at::kFloat && beta.is_contiguous() && beta.numel() == total * heads, "beta is ",
              beta.scalar_type(), beta.sizes());
  const Rows rows = rows_of(slots, row_starts, fresh, scratch, snapshot_rows, snapshot_slots, total, states.size(0));
  check_scratch(scratch_states, rows, states, "scratch_states");
  at::Tensor out = unfilled({total, heads, v_dim}, qkv.scalar_type());
  Delta d{};
  d.qkv = view_of(qkv, "qkv");
  d.out = view_of(out, "out");
  d.g = g.const_data_ptr<float>();
  d.beta = beta.const_data_ptr<float>();
  d.per_key = per_key;
  d.state_type = type_of(states, "states");
  d.k_heads = num_k_heads;
  d.heads = heads;
  d.k_dim = k_dim;
  d.v_dim = v_dim;
  each_state(rows, states, scratch_states, [&](const StateItem& item) { kernels().delta(d, item); });
  return out;
}

at::Tensor selective_scan(const at::Tensor& xbc, const at::Tensor& dt, const at::Tensor& a, const at::Tensor& dt_bias,
                          const at::Tensor& skip, int64_t num_groups, const at::Tensor& states,
                          const at::Tensor& slots, const at::Tensor& row_starts, const at::Tensor& fresh,
                          const std::optional<at::Tensor>& scratch, const std::optional<at::Tensor>& snapshot_rows,
                          const std::optional<at::Tensor>& snapshot_slots,
                          const std::optional<at::Tensor>& scratch_states) {
  check_states(states, scratch_states);
  const int64_t total = xbc.size(0), heads = states.size(1), v_dim = states.size(2), k_dim = states.size(3);
  TORCH_CHECK(num_groups > 0 && heads % num_groups == 0, heads, " heads, ", num_groups,
              " groups; a multiple is needed");
  TORCH_CHECK(xbc.dim() == 2 && xbc.size(1) == heads * v_dim + 2 * num_groups * k_dim, "xbc is ", xbc.sizes());
  TORCH_CHECK(dt.dim() == 2 && dt.size(0) == total && dt.size(1) == heads, "dt is ", dt.sizes(), "; [", total, ", ",
              heads, "] is needed");
  TORCH_CHECK(a.numel() == heads && dt_bias.numel() == heads && skip.numel() == heads, "a is ", a.sizes(),
              ", dt_bias ", dt_bias.sizes(), ", skip ", skip.sizes(), "; ", heads, " elements are needed");
  const Rows rows = rows_of(slots, row_starts, fresh, scratch, snapshot_rows, snapshot_slots, total, states.size(0));
  check_scratch(scratch_states, rows, states, "scratch_states");
  const at::Tensor wide_dt = dt.to(at::kFloat).contiguous(), rate = a.to(at::kFloat).contiguous();
  const at::Tensor shift = dt_bias.to(at::kFloat).contiguous(), through = skip.to(at::kFloat).contiguous();
  at::Tensor step = unfilled({total, heads}, at::kFloat), decay = unfilled({total, heads}, at::kFloat);
  const float *in = wide_dt.const_data_ptr<float>(), *bias = shift.const_data_ptr<float>();
  const float* rates = rate.const_data_ptr<float>();
  float *steps = step.data_ptr<float>(), *decays = decay.data_ptr<float>();
  at::parallel_for(0, total * heads, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      steps[i] = softplus(in[i] + bias[i % heads]);
      decays[i] = std::exp(steps[i] * rates[i % heads]);
    }
  });
  at::Tensor out = unfilled({total, heads, v_dim}, xbc.scalar_type());
  Scan s{};
  s.xbc = view_of(xbc, "xbc");
  s.out = view_of(out, "out");
  s.step = steps;
  s.decay = decays;
  s.skip = through.const_data_ptr<float>();
  s.state_type = type_of(states, "states");
  s.groups = num_groups;
  s.heads = heads;
  s.k_dim = k_dim;
  s.v_dim = v_dim;
  each_state(rows, states, scratch_states, [&](const StateItem& item) { kernels().scan(s, item); });
  return out;
}

at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps,
                          bool silu, bool gate_first) {
  TORCH_CHECK(x.sizes() == gate.sizes() && x.scalar_type() == gate.scalar_type() && x.dim() >= 2, "x is ",
              x.scalar_type(), x.sizes(), " and gate ", gate.scalar_type(), gate.sizes());
  const bool one_weight = weight.dim() == 1;
  TORCH_CHECK(weight.is_contiguous() && weight.size(-1) == x.size(-1) &&
                  (one_weight || (weight.dim() == 2 && x.dim() == 3 && weight.size(0) == x.size(1))),
              "weight has shape ", weight.sizes(), " and x ", x.sizes());
  const at::Tensor in = x.dim() == 3 ? x : x.reshape({-1, 1, x.size(-1)});
  const at::Tensor gates = gate.dim() == 3 ? gate : gate.reshape({-1, 1, x.size(-1)});
  at::Tensor out = unfilled(in.sizes(), x.scalar_type());
  GatedNorm n{};
  n.x = view_of(in, "x");
  n.gate = view_of(gates, "gate");
  n.out = view_of(out, "out");
  n.weight = weight.const_data_ptr();
  n.weight_type = type_of(weight, "weight");
  n.weight_stride = one_weight ? 0 : in.size(2);
  n.heads = in.size(1);
  n.size = in.size(2);
  n.eps = float(eps);
  n.silu = silu;
  n.gate_first = gate_first;
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, n.size));
  at::parallel_for(0, in.size(0) * n.heads, grain,
                   [&](int64_t begin, int64_t end) { kernels().gated_norm(n, begin, end); });
  return out.view(x.sizes());
}

}  // namespace

TORCH_LIBRARY_IMPL(sglang_cpu, CPU, m) {
  m.impl("causal_conv", causal_conv);
  m.impl("delta_gates", delta_gates);
  m.impl("delta_rule", delta_rule);
  m.impl("selective_scan", selective_scan);
  m.impl("gated_rms_norm", gated_rms_norm);
}

}  // namespace sglang_cpu
