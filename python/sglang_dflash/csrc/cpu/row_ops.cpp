// The row-wise ops: norms, rotary embedding, block layout, context KV, argmax, softmax, greedy acceptance. Also the
// choice of the kernels.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "host_ops.h"
#include "logits.h"

namespace sglang_dflash {

const Kernels& kernels() {
  static const Kernels* const chosen = [] {
    const char* asked = std::getenv("SGLANG_DFLASH_ISA");
    const Kernels* found = choose_kernels(asked);
    TORCH_CHECK(found, "SGLANG_DFLASH_ISA is '", asked, "'; allowed: what this machine has of avx512, avx2, scalar");
    return found;
  }();
  return *chosen;
}

namespace {

std::string isa() { return kernels().name; }

void normalise(const at::Tensor& x, const at::Tensor* residual, const at::Tensor& weight, double eps, at::Tensor& out,
               at::Tensor* residual_out) {
  const int64_t size = x.size(-1), rows = size == 0 ? 0 : x.numel() / size;
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == size && weight.is_contiguous(), "weight has shape ",
              weight.sizes(), "; [", size, "] is needed");
  Norm n{};
  n.x = view_of(x, "x");
  n.out = view_of(out, "out");
  if (residual) {
    TORCH_CHECK(residual->sizes() == x.sizes() && residual->scalar_type() == x.scalar_type(), "residual is ",
                residual->scalar_type(), residual->sizes(), ", x ", x.scalar_type(), x.sizes());
    n.residual = view_of(*residual, "residual");
    n.residual_out = view_of(*residual_out, "residual_out");
  }
  n.weight = weight.const_data_ptr();
  n.weight_type = type_of(weight, "weight");
  n.size = size;
  n.eps = float(eps);
  at::parallel_for(0, rows, grain(size), [&](int64_t begin, int64_t end) { kernels().norm(n, begin, end); });
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor rows = x.contiguous().view({-1, x.size(-1)});
  at::Tensor out = unfilled(rows.sizes(), x.scalar_type());
  normalise(rows, nullptr, weight, eps, out, nullptr);
  return out.view(x.sizes());
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                const at::Tensor& weight, double eps) {
  const at::Tensor rows = x.contiguous().view({-1, x.size(-1)});
  const at::Tensor residual_rows = residual.contiguous().view({-1, residual.size(-1)});
  at::Tensor out = unfilled(rows.sizes(), x.scalar_type()), residual_out = unfilled(rows.sizes(), x.scalar_type());
  normalise(rows, &residual_rows, weight, eps, out, &residual_out);
  return {out.view(x.sizes()), residual_out.view(x.sizes())};
}

// The arguments of a head's norm and rotation, without `in` and `out`.
Heads heads_of(int64_t heads, int64_t dim, const at::Tensor* weight, double eps, const at::Tensor& cos_sin) {
  TORCH_CHECK(dim <= kMaxHead, "a head has ", dim, " elements; allowed: up to ", kMaxHead);
  TORCH_CHECK(cos_sin.dim() == 2 && dense(cos_sin) && cos_sin.size(1) % 2 == 0 && cos_sin.size(1) <= dim,
              "cos_sin has shape ", cos_sin.sizes(), "; [P, R] with an even R up to ", dim, " is needed");
  Heads h{};
  h.heads = heads;
  h.dim = dim;
  h.eps = float(eps);
  h.cos_sin = cos_sin.const_data_ptr();
  h.cos_sin_type = type_of(cos_sin, "cos_sin");
  h.cos_sin_stride = cos_sin.stride(0);
  h.rotary_dim = cos_sin.size(1);
  h.weight_type = Type::kFloat;
  if (weight) {
    TORCH_CHECK(weight->size(-1) == dim && weight->is_contiguous(), "weight has shape ", weight->sizes(), "; [", dim,
                "] is needed");
    h.weight = weight->const_data_ptr();
    h.weight_type = type_of(*weight, "weight");
  }
  return h;
}

void norm_rope_(at::Tensor& x, const std::optional<at::Tensor>& weight, double eps, const at::Tensor& positions,
                const at::Tensor& cos_sin) {
  TORCH_CHECK(x.dim() == 3, "x has shape ", x.sizes(), "; [N, heads, D] is needed");
  TORCH_CHECK(!weight || weight->dim() == 1, "weight needs 1 dimension");
  const int64_t rows = x.size(0);
  Heads h = heads_of(x.size(1), x.size(2), weight ? &*weight : nullptr, eps, cos_sin);
  h.in = h.out = view_of(x, "x");
  const int64_t* position = ids_of(positions, "positions", rows);
  require_below(position, rows, cos_sin.size(0), "positions");
  at::parallel_for(0, rows, grain(x.size(1) * x.size(2)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) kernels().norm_rope(h, row, row, position[row]);
  });
}

void check_caches(at::TensorList caches, const at::Tensor& kv, const char* name) {
  TORCH_CHECK(int64_t(caches.size()) == kv.size(1), caches.size(), " ", name, " for ", kv.size(1), " layers");
  for (const auto& cache : caches)
    TORCH_CHECK(cache.scalar_type() == kv.scalar_type() && cache.dim() == 3 && cache.size(1) == kv.size(3) &&
                    cache.size(2) == kv.size(4) && cache.size(0) == caches[0].size(0),
                "a cache of ", name, " is ", cache.scalar_type(), cache.sizes(), "; kv is ", kv.scalar_type(),
                kv.sizes());
}

at::Tensor row_argmax(const at::Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && dense(logits), "logits are ", logits.sizes(), " with strides ",
              logits.strides(), "; [N, V] with dense rows is needed");
  const int64_t rows = logits.size(0), vocabulary = logits.size(1), stride = logits.stride(0) * logits.element_size();
  const Type type = type_of(logits, "logits");
  at::Tensor ids = unfilled({rows}, at::kLong);
  const char* base = static_cast<const char*>(logits.const_data_ptr());
  int64_t* id = ids.data_ptr<int64_t>();
  each_of_logits(rows, vocabulary, [&](int64_t row) {
    id[row] = argmax_of(base + row * stride, type, vocabulary, logits.element_size());
  });
  return ids;
}

Three accept_greedy(const at::Tensor& logits, const at::Tensor& ids) {
  TORCH_CHECK(logits.dim() == 3 && logits.size(2) > 0 && dense(logits), "logits are ", logits.sizes(),
              " with strides ", logits.strides(), "; [B, W, V] with dense rows is needed");
  TORCH_CHECK(ids.scalar_type() == at::kLong && ids.is_contiguous() && ids.dim() == 2 &&
                  ids.sizes() == logits.sizes().slice(0, 2) && ids.size(1) > 0,
              "ids are ", ids.scalar_type(), ids.sizes(), "; dense int64 of the logits' [B, W] is needed");
  const int64_t batch = ids.size(0), width = ids.size(1), vocabulary = logits.size(2);
  const Type type = type_of(logits, "logits");
  at::Tensor out_ids = unfilled({batch, width}, at::kLong), commit_lens = unfilled({batch}, at::kInt);
  at::Tensor bonus_ids = unfilled({batch}, at::kLong);
  const int64_t element = logits.element_size();
  const char* base = static_cast<const char*>(logits.const_data_ptr());
  const int64_t batch_stride = logits.stride(0) * element, row_stride = logits.stride(1) * element;
  const int64_t* drafts = ids.const_data_ptr<int64_t>();
  int64_t *out = out_ids.data_ptr<int64_t>(), *bonus = bonus_ids.data_ptr<int64_t>();
  int32_t* lens = commit_lens.data_ptr<int32_t>();
  each_of_logits(batch, vocabulary, [&](int64_t b) {
    std::fill_n(out + b * width, width, int64_t(0));
    int64_t row = 0;
    for (;; row++) {  // rows after the first rejected draft are not read
      bonus[b] = argmax_of(base + b * batch_stride + row * row_stride, type, vocabulary, element);
      out[b * width + row] = bonus[b];
      if (row + 1 == width || drafts[b * width + row + 1] != bonus[b]) break;
    }
    lens[b] = int32_t(row + 1);
  });
  return {out_ids, commit_lens, bonus_ids};
}

}  // namespace

void write_context_kv(const at::Tensor& kv, const at::Tensor& k_norm_weight, double eps, const at::Tensor& positions,
                      const at::Tensor& cos_sin, const at::Tensor& slots, const Tensors& k_caches,
                      const Tensors& v_caches) {
  TORCH_CHECK(kv.dim() == 5 && kv.size(2) == 2, "kv has shape ", kv.sizes(), "; [N, L, 2, Hkv, D] is needed");
  check_caches(k_caches, kv, "k_caches");
  check_caches(v_caches, kv, "v_caches");
  const int64_t rows = kv.size(0), layers = kv.size(1), heads = kv.size(3), dim = kv.size(4);
  if (kv.numel() == 0) return;
  TORCH_CHECK(k_norm_weight.dim() == 2 && k_norm_weight.size(0) == layers, "k_norm_weight has shape ",
              k_norm_weight.sizes());
  const int64_t* position = ids_of(positions, "positions", rows);
  const int64_t* slot = ids_of(slots, "slots", rows);
  require_below(position, rows, cos_sin.size(0), "positions");
  require_below(slot, rows, k_caches[0].size(0), "slots");
  std::vector<Heads> keys;
  std::vector<std::pair<View, View>> values;
  for (int64_t layer = 0; layer < layers; layer++) {
    const at::Tensor weight = k_norm_weight.select(0, layer);
    keys.push_back(heads_of(heads, dim, &weight, eps, cos_sin));
    keys.back().in = view_of(kv.select(1, layer).select(1, 0), "kv");
    keys.back().out = view_of(k_caches[layer], "k_caches");
    values.emplace_back(view_of(kv.select(1, layer).select(1, 1), "kv"), view_of(v_caches[layer], "v_caches"));
  }
  const int64_t element = kv.element_size();
  at::parallel_for(0, rows * layers, grain(2 * heads * dim), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i / layers, layer = i % layers;
      kernels().norm_rope(keys[layer], row, slot[row], position[row]);
      copy_heads(values[layer].first, values[layer].second, row, slot[row], heads, dim, element);
    }
  });
}

Three block_layout(const at::Tensor& bonus_ids, const at::Tensor& prefix_lens, const at::Tensor& req_pool_indices,
                   const at::Tensor& req_to_token, int64_t block_size, int64_t mask_token_id) {
  require_table(req_to_token);
  const int64_t batch = bonus_ids.numel();
  const at::Tensor prefixes = prefix_lens.to(at::kLong), rows = req_pool_indices.to(at::kLong);
  const int64_t* bonus = ids_of(bonus_ids, "bonus_ids", batch);
  const int64_t* prefix = ids_of(prefixes, "prefix_lens", batch);
  const int64_t* row = ids_of(rows, "req_pool_indices", batch);
  require_below(row, batch, req_to_token.size(0), "req_pool_indices");
  require_below(prefix, batch, req_to_token.size(1) - block_size + 1, "prefix_lens");
  at::Tensor ids = unfilled({batch, block_size}, at::kLong);
  at::Tensor positions = unfilled({batch, block_size}, at::kLong), slots = unfilled({batch, block_size}, at::kLong);
  int64_t *id = ids.data_ptr<int64_t>(), *position = positions.data_ptr<int64_t>(), *slot = slots.data_ptr<int64_t>();
  const int32_t* table = req_to_token.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < batch; b++) {
    for (int64_t i = 0; i < block_size; i++, id++, position++, slot++) {
      *id = i == 0 ? bonus[b] : mask_token_id;
      *position = prefix[b] + i;
      *slot = table[row[b] * req_to_token.stride(0) + *position];
    }
  }
  return {ids, positions, slots};
}

std::tuple<at::Tensor, at::Tensor> best_log_probs(const at::Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && dense(logits), "logits are ", logits.sizes(), " with strides ",
              logits.strides(), "; [N, V] with dense rows is needed");
  constexpr int64_t kSpan = 16384;
  const int64_t rows = logits.size(0), vocabulary = logits.size(1), element = logits.element_size();
  const int64_t spans = (vocabulary + kSpan - 1) / kSpan;
  const Type type = type_of(logits, "logits");
  at::Tensor ids = unfilled({rows}, at::kLong), log_probs = unfilled({rows}, at::kFloat);
  const char* base = static_cast<const char*>(logits.const_data_ptr());
  int64_t* id = ids.data_ptr<int64_t>();
  float* log_prob = log_probs.data_ptr<float>();
  each_of_logits(rows, vocabulary, [&](int64_t row) {
    const char* values = base + row * logits.stride(0) * element;
    std::vector<Softmax> parts(spans, Softmax{-INFINITY, 0, 0});
    at::parallel_for(0, spans, 2, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        kernels().softmax(values + i * kSpan * element, type, i * kSpan, std::min(kSpan, vocabulary - i * kSpan),
                          parts[i]);
    });
    Softmax best = parts[0];
    for (const Softmax& part : parts)
      if (part.value > best.value) best = part;
    float sum = 0;
    for (const Softmax& part : parts)
      if (part.value > -INFINITY) sum += part.sum * std::exp(part.value - best.value);
    id[row] = best.index;
    log_prob[row] = sum > 0 && sum < INFINITY ? -std::log(sum) : -INFINITY;  // without a finite maximum: no chance
  });
  return {ids, log_probs};
}

TORCH_LIBRARY_IMPL(sglang_dflash, CPU, m) {
  m.impl("norm_rope_", norm_rope_);
  m.impl("rms_norm", rms_norm);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("row_argmax", row_argmax);
  m.impl("accept_greedy", accept_greedy);
}

TORCH_LIBRARY_IMPL(sglang_dflash, CompositeExplicitAutograd, m) { m.impl("isa", isa); }

}  // namespace sglang_dflash
