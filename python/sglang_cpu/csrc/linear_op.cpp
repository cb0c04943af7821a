// The op linear: x times a weight's transpose, for few rows. install_linear makes torch's own products use it.
#include <ATen/CPUFunctions.h>
#include <ATen/cpu/Utils.h>
#include <c10/util/Exception.h>

#include "common.h"

namespace sglang_cpu {
namespace {

constexpr int64_t kItemProducts = 1 << 14;  // multiplications of one work item, at least: one or two microseconds
constexpr int64_t kFew = 512;               // rows of one pass: bounds the float32 copy of x

// `multiply` for at most kFew rows; the threads share the columns.
void multiply_few(const at::Tensor& x, const at::Tensor& weight, const at::Tensor* addend, const at::Tensor& out) {
  const at::Tensor rows = x.to(at::kFloat).contiguous();
  const int64_t columns = weight.size(0);
  Linear l{};
  l.type = type_of(weight, "weight");
  l.x = rows.const_data_ptr<float>();
  l.weight = weight.const_data_ptr();
  l.out = out.data_ptr();
  l.addend = addend ? addend->const_data_ptr() : nullptr;
  l.addend_stride = addend && addend->dim() == 2 ? addend->stride(0) : 0;
  l.rows = x.size(0);
  l.inner = x.size(1);
  l.x_stride = rows.stride(0);
  l.weight_stride = weight.stride(0);
  l.out_stride = out.stride(0);
  Linear packed = l;
  packed.rows = l.panel_rows = kernels().panel_rows(l);
  at::Tensor panels;
  if (l.panel_rows) {
    panels = unfilled({padded(l.panel_rows), padded(l.inner)}, rows.scalar_type());
    kernels().pack_panels(packed, panels.data_ptr<float>());
    l.panels = panels.const_data_ptr<float>();
  }
  const int64_t span = (kItemProducts / std::max<int64_t>(1, l.rows * l.inner) / kColumnUnit + 1) * kColumnUnit;
  each_item((columns + span - 1) / span, [&](int64_t item, int64_t) {
    kernels().linear(l, item * span, std::min(columns, (item + 1) * span));
  });
}

// out [N, O] = x [N, H] weight [O, H]^T + addend [O] or [N, O]; all have dense rows.
void multiply(const at::Tensor& x, const at::Tensor& weight, const at::Tensor* addend, at::Tensor& out) {
  if (out.numel() == 0) return;
  if (x.size(0) <= kFew) return multiply_few(x, weight, addend, out);
  for (int64_t row = 0; row < x.size(0); row += kFew) {
    const int64_t rows = std::min(kFew, x.size(0) - row);
    const bool by_row = addend && addend->dim() == 2;
    const at::Tensor part = by_row ? addend->narrow(0, row, rows) : addend ? *addend : at::Tensor();
    multiply_few(x.narrow(0, row, rows), weight, addend ? &part : nullptr, out.narrow(0, row, rows));
  }
}

bool fits(const at::Tensor& addend, int64_t rows, const at::Tensor& weight) {
  return (addend.dim() == 1 || (addend.dim() == 2 && addend.size(0) == rows)) && addend.size(-1) == weight.size(0) &&
         dense(addend) && addend.scalar_type() == weight.scalar_type();
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& addend) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1) && dense(weight), "x is ", x.sizes(),
              ", weight ", weight.sizes(), " with strides ", weight.strides(),
              "; [N, H] and [O, H] with dense rows are needed");
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "x is ", x.scalar_type(), ", weight ", weight.scalar_type());
  TORCH_CHECK(!addend || fits(*addend, x.size(0), weight), "the addend is ", addend->scalar_type(), addend->sizes(),
              ", weight ", weight.scalar_type(), weight.sizes(), "; [O] or [N, O] of its dtype is needed");
  at::Tensor out = unfilled({x.size(0), weight.size(0)}, x.scalar_type());
  multiply(x, weight, addend ? &*addend : nullptr, out);
  return out;
}

// Replacements of torch's `mm` and `addmm`. They compute products whose second factor is the transpose of a dense
// weight, as in `F.linear`; inductor folds a residual into such a product as the addend. Other products, and those of
// many rows, call torch's own kernels directly: the dispatcher would bring them back here.

bool multiplies_bfloat16() {
  const auto capabilities = at::cpu::get_cpu_capabilities();
  const auto found = capabilities.find("avx512_bf16");
  return found != capabilities.end() && found->second.toBool();
}

int64_t most_rows(at::ScalarType type) {
  static const bool emulates = !multiplies_bfloat16();
  return type == at::kBFloat16 && emulates ? kernels().linear_rows_bfloat16 : kernels().linear_rows;
}

bool serves(const at::Tensor& a, const at::Tensor& b) {
  const auto type = a.scalar_type();
  return a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && a.size(0) <= most_rows(type) &&
         b.scalar_type() == type && (type == at::kFloat || type == at::kBFloat16) && b.stride(0) == 1 &&
         (b.size(1) <= 1 || b.stride(1) >= b.size(0));
}

bool serves(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
  return serves(a, b) && out.scalar_type() == a.scalar_type() && out.dim() == 2 && out.size(0) == a.size(0) &&
         out.size(1) == b.size(1) && dense(out);
}

bool plain(const at::Scalar& beta, const at::Scalar& alpha) {
  return beta.toComplexDouble() == 1.0 && alpha.toComplexDouble() == 1.0;
}

at::Tensor mm(const at::Tensor& a, const at::Tensor& b) {
  return serves(a, b) ? linear(a, b.t(), {}) : at::cpu::mm(a, b);
}

at::Tensor& mm_out(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  if (!serves(a, b, out)) return at::cpu::mm_out(out, a, b);
  multiply(a, b.t(), nullptr, out);
  return out;
}

at::Tensor addmm(const at::Tensor& addend, const at::Tensor& a, const at::Tensor& b, const at::Scalar& beta,
                 const at::Scalar& alpha) {
  const bool ours = serves(a, b) && plain(beta, alpha) && fits(addend, a.size(0), b.t());
  return ours ? linear(a, b.t(), addend) : at::cpu::addmm(addend, a, b, beta, alpha);
}

at::Tensor& addmm_out(const at::Tensor& addend, const at::Tensor& a, const at::Tensor& b, const at::Scalar& beta,
                      const at::Scalar& alpha, at::Tensor& out) {
  const bool ours = serves(a, b, out) && plain(beta, alpha) && fits(addend, a.size(0), b.t());
  if (!ours) return at::cpu::addmm_out(out, addend, a, b, beta, alpha);
  multiply(a, b.t(), &addend, out);
  return out;
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Registers the replacements for the rest of this process.
void install_linear() {
  static const auto* const library = [] {
    Silent silent;  // the dispatcher warns about replaced kernels, which is intended here
    c10::WarningUtils::WarningHandlerGuard guard(&silent);
    auto* aten = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
    aten->impl("mm", mm);
    aten->impl("mm.out", mm_out);
    aten->impl("addmm", addmm);
    aten->impl("addmm.out", addmm_out);
    return aten;
  }();
  (void)library;
}

}  // namespace

TORCH_LIBRARY_IMPL(sglang_cpu, CPU, m) { m.impl("linear", linear); }

TORCH_LIBRARY_IMPL(sglang_cpu, CompositeExplicitAutograd, m) { m.impl("install_linear", install_linear); }

}  // namespace sglang_cpu
