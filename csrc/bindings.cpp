// Schemas of the native ops; their bodies are in cpu/.
#include <torch/library.h>

TORCH_LIBRARY(sglang_dflash, m) {
  m.def("isa() -> str");
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor req_to_token, Tensor req_pool_indices, "
      "Tensor prefix_lens, Tensor row_starts, float scaling, bool causal, int window_left, Tensor? row_mask, "
      "Tensor? sinks=None) -> Tensor");
  m.def(
      "write_and_attend(Tensor q, Tensor k, Tensor v, Tensor slots, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor req_to_token, Tensor req_pool_indices, Tensor prefix_lens, Tensor row_starts, float scaling, "
      "bool causal, int window_left, Tensor? row_mask, Tensor? sinks=None) -> Tensor");
  m.def(
      "block_layout(Tensor bonus_ids, Tensor prefix_lens, Tensor req_pool_indices, Tensor req_to_token, "
      "int block_size, int mask_token_id) -> (Tensor, Tensor, Tensor)");
  m.def(
      "write_context_kv(Tensor kv, Tensor k_norm_weight, float eps, Tensor positions, Tensor cos_sin, Tensor slots, "
      "Tensor(a!)[] k_caches, Tensor(b!)[] v_caches) -> ()");
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
  m.def("accept_greedy(Tensor logits, Tensor ids) -> (Tensor, Tensor, Tensor)");
  m.def("top_log_probs(Tensor logits, int count) -> (Tensor, Tensor)");
  m.def("best_first(Tensor chances, int rows) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "platt(Tensor log_probs, Tensor shared, Tensor own, int[] places, float max_logit) -> Tensor");
  m.def(
      "platt_steps(Tensor(a!) shared, Tensor(b!) own, int[] places, int[] drafted, Tensor[] row_starts, "
      "Tensor[] parents, Tensor[] depths, Tensor[] ranks, Tensor[] paths, Tensor[] log_probs, float[] tuning) -> ()");
  m.def(
      "plan_rows(Tensor log_probs, Tensor shared, Tensor own, int[] places, float max_logit, int max_rows, float least, "
      "int[] drafted, int batch) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
      "Tensor, int, int[], int, float)");
  m.def(
      "keep_offers(Tensor(a!) reaches, Tensor(b!) depths, Tensor(c!) drafted, Tensor(d!) through, Tensor(e!) odds, "
      "Tensor(f!) kept, Tensor(g!) deep, int[] places, Tensor[] chances, Tensor[] tree_reaches, Tensor[] tree_depths, "
      "float deep_weight, float own_share) -> ()");
  m.def(
      "best_width(Tensor reaches, Tensor depths, Tensor drafted, Tensor through, Tensor odds, Tensor kept, Tensor deep, "
      "int[] places, int[] others, float prior_steps, float[] costs, float price) -> (int, int[], float, float)");
  m.def(
      "take_rows(Tensor parents, Tensor depths, Tensor ranks, int[] drafted, int[] lens, int batch) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int)");
  m.def(
      "lay_out_trees(Tensor depths, Tensor ranks, Tensor requests, Tensor row_starts, int[] drafted, "
      "Tensor candidate_ids, Tensor bonus_ids, Tensor prefix_lens, Tensor req_pool_indices, Tensor req_to_token) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "exchange_slots(Tensor(a!) req_to_token, Tensor req_pool_indices, Tensor prefix_lens, Tensor path, "
      "Tensor commit_lens, Tensor row_starts) -> ()");
  m.def(
      "committed_rows(Tensor req_to_token, Tensor req_pool_indices, Tensor prefix_lens, Tensor path, "
      "Tensor commit_lens) -> (Tensor, Tensor, Tensor)");
  m.def(
      "accept_tree(Tensor target_ids, Tensor ids, Tensor parents, Tensor row_starts, int length) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "accept_tree_greedy(Tensor logits, Tensor ids, Tensor parents, Tensor row_starts, int length) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
}
