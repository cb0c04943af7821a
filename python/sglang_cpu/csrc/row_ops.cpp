// The row-wise ops: norms, rotary embedding, argmax, softmax. Also the choice of the kernels.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "logits.h"

namespace sglang_cpu {

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

std::string sources() { return SOURCES; }

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

// The arguments of a head's norm and rotation, without `x`.
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
  h.x = view_of(x, "x");
  const int64_t* position = ids_of(positions, "positions", rows);
  require_below(position, rows, cos_sin.size(0), "positions");
  at::parallel_for(0, rows, grain(x.size(1) * x.size(2)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) kernels().norm_rope(h, row, position[row]);
  });
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

}  // namespace

TORCH_LIBRARY_IMPL(sglang_cpu, CPU, m) {
  m.impl("norm_rope_", norm_rope_);
  m.impl("rms_norm", rms_norm);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("row_argmax", row_argmax);
  m.impl("best_log_probs", best_log_probs);
}

TORCH_LIBRARY_IMPL(sglang_cpu, CompositeExplicitAutograd, m) {
  m.impl("isa", isa);
  m.impl("sources", sources);
}

}  // namespace sglang_cpu
