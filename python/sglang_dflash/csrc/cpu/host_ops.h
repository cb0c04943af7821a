// The ops that Python calls directly, without torch's dispatcher: those around a forward. A call through the dispatcher
// takes twice as long, because more code has to come into the processor's caches, which the models' weights have
// filled. Nothing that is compiled or captured calls them.
#pragma once

#include <tuple>
#include <vector>

#include "common.h"

namespace sglang_dflash {

using Tensors = std::vector<at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The fields of PlannedRows in their order. A mask that is left out is an undefined tensor, Python's None.
using Rows = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, std::vector<int64_t>,
                        at::Tensor, int64_t, int64_t>;

// row_ops.cpp
Three block_layout(const at::Tensor& bonus_ids, const at::Tensor& prefix_lens, const at::Tensor& req_pool_indices,
                   const at::Tensor& req_to_token, int64_t block_size, int64_t mask_token_id);
void write_context_kv(const at::Tensor& kv, const at::Tensor& k_norm_weight, double eps, const at::Tensor& positions,
                      const at::Tensor& cos_sin, const at::Tensor& slots, const Tensors& k_caches,
                      const Tensors& v_caches);

// plan_ops.cpp
at::Tensor platt(const at::Tensor& log_probs, const at::Tensor& shared, const at::Tensor& own, at::IntArrayRef places,
                 double max_logit);
Four best_first(const at::Tensor& chances, int64_t rows);
Rows take_rows(const at::Tensor& parents, const at::Tensor& depths, const at::Tensor& ranks, at::IntArrayRef drafted,
               at::IntArrayRef lens, int64_t batch, at::IntArrayRef copied, at::IntArrayRef copied_lens);
Rows plan_rows(const at::Tensor& log_probs, const at::Tensor& shared, const at::Tensor& own, const at::Tensor& blocks,
               int64_t first_block, at::IntArrayRef places, double max_logit, double least, at::IntArrayRef drafted,
               int64_t batch, at::IntArrayRef copied, at::IntArrayRef copied_lens);

// learn_ops.cpp
std::tuple<int64_t, int64_t, double, int64_t> learn_steps(
    const at::Tensor& shared, const at::Tensor& own, const Tensors& offer_tables, const at::Tensor& by_depth,
    const at::Tensor& own_by_depth, const at::Tensor& blocks, at::IntArrayRef places, at::IntArrayRef counts,
    const Tensors& paths, const std::vector<double>& tuning, at::IntArrayRef fresh);

// offer_ops.cpp
std::tuple<int64_t, std::vector<int64_t>, double, double> best_width(
    const Tensors& offer_tables, at::IntArrayRef places, at::IntArrayRef others, double prior_steps,
    const std::vector<double>& costs, double price);

// tree_ops.cpp
std::tuple<at::Tensor, at::Tensor> top_log_probs(const at::Tensor& logits, int64_t count);
Four accept_tree(const at::Tensor& target_ids, const at::Tensor& ids, const at::Tensor& parents,
                 const at::Tensor& row_starts, int64_t length);
Four accept_tree_greedy(const at::Tensor& logits, const at::Tensor& ids, const at::Tensor& parents,
                        const at::Tensor& row_starts, int64_t length);
Three lay_out_trees(const at::Tensor& depths, const at::Tensor& ranks, const at::Tensor& requests,
                    const at::Tensor& row_starts, at::IntArrayRef drafted, const at::Tensor& candidate_ids,
                    const at::Tensor& bonus_ids, const at::Tensor& prefix_lens, const at::Tensor& req_pool_indices,
                    const at::Tensor& req_to_token);
void exchange_slots(const at::Tensor& req_to_token, const at::Tensor& req_pool_indices, const at::Tensor& prefix_lens,
                    const at::Tensor& path, const at::Tensor& commit_lens, const at::Tensor& row_starts);
Four committed_rows(const at::Tensor& req_to_token, const at::Tensor& req_pool_indices, const at::Tensor& prefix_lens,
                    const at::Tensor& path, const at::Tensor& commit_lens, const at::Tensor& hidden);

}  // namespace sglang_dflash
