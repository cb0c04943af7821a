// Schemas of the native ops. Loading the library registers them with torch.
#include <torch/library.h>

TORCH_LIBRARY(sglang_cpu, m) {
  m.def("isa() -> str");
  m.def("sources() -> str");  // the digest of all sources, from ops/build_native.py
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor req_to_token, Tensor req_pool_indices, "
      "Tensor prefix_lens, Tensor row_starts, float scaling, bool causal, int window_left, "
      "Tensor? sinks=None) -> Tensor");
  m.def(
      "write_and_attend(Tensor q, Tensor k, Tensor v, Tensor slots, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor req_to_token, Tensor req_pool_indices, Tensor prefix_lens, Tensor row_starts, float scaling, "
      "bool causal, int window_left, Tensor? sinks=None) -> Tensor");
  m.def(
      "norm_rope_(Tensor(a!) x, Tensor? weight, float eps, Tensor positions, Tensor cos_sin) -> ()");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def(
      "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) states, Tensor slots, Tensor row_starts, "
      "Tensor fresh, Tensor? scratch, Tensor? snapshot_rows, Tensor? snapshot_slots, Tensor(b!)? windows) -> Tensor");
  m.def("delta_gates(Tensor a, Tensor b, Tensor a_log, Tensor dt_bias) -> (Tensor, Tensor)");
  m.def(
      "delta_rule(Tensor qkv, Tensor g, Tensor beta, int num_k_heads, Tensor(a!) states, Tensor slots, "
      "Tensor row_starts, Tensor fresh, Tensor? scratch, Tensor? snapshot_rows, Tensor? snapshot_slots, "
      "Tensor(b!)? scratch_states) -> Tensor");
  m.def(
      "selective_scan(Tensor xbc, Tensor dt, Tensor a, Tensor dt_bias, Tensor skip, int num_groups, Tensor(a!) states, "
      "Tensor slots, Tensor row_starts, Tensor fresh, Tensor? scratch, Tensor? snapshot_rows, Tensor? snapshot_slots, "
      "Tensor(b!)? scratch_states) -> Tensor");
  m.def(
      "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, bool silu=True, bool gate_first=False) -> "
      "Tensor");
  m.def("experts(Tensor x, Tensor up, Tensor down, Tensor ids, Tensor weights, str activation) -> Tensor");
  m.def("install_linear() -> ()");
  m.def("linear(Tensor x, Tensor weight, Tensor? addend) -> Tensor");
  m.def("row_argmax(Tensor logits) -> Tensor");
  m.def("best_log_probs(Tensor logits) -> (Tensor, Tensor)");
}
