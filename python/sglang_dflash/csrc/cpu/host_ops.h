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

Three block_layout(const at::Tensor& bonus_ids, const at::Tensor& prefix_lens, const at::Tensor& req_pool_indices,
                   const at::Tensor& req_to_token, int64_t block_size, int64_t mask_token_id);
void write_context_kv(const at::Tensor& kv, const at::Tensor& k_norm_weight, double eps, const at::Tensor& positions,
                      const at::Tensor& cos_sin, const at::Tensor& slots, const Tensors& k_caches,
                      const Tensors& v_caches);
std::tuple<at::Tensor, at::Tensor> best_log_probs(const at::Tensor& logits);

}  // namespace sglang_dflash
