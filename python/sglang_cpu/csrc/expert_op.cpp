// The op experts: the products of a mixture of experts, each expert's for all of its rows together.
#include "common.h"

namespace sglang_cpu {
namespace {

constexpr int64_t kItemProducts = 1 << 14;  // multiplications of one work item, at least: one or two microseconds
constexpr int64_t kItemColumns = 2 * kColumnUnit;
constexpr int64_t kItemSums = 1 << 14;      // the same for the weighted sums
constexpr int64_t kElsewhere = -1;          // the id of an expert that another rank has

static_assert(kItemColumns % kMostLanes == 0, "activations take whole vectors of a work item's columns");

// The rows of all experts, those of one expert side by side.
struct Grouped {
  std::vector<int64_t> starts;  // [E + 1]
  std::vector<int64_t> places;  // [T, K]: the place of a token's k-th expert, or kElsewhere
};

Grouped group(const int64_t* ids, int64_t pairs, int64_t experts) {
  Grouped grouped{std::vector<int64_t>(experts + 1), std::vector<int64_t>(pairs)};
  for (int64_t i = 0; i < pairs; i++)
    if (ids[i] != kElsewhere) grouped.starts[ids[i] + 1]++;
  for (int64_t e = 0; e < experts; e++) grouped.starts[e + 1] += grouped.starts[e];
  std::vector<int64_t> next(grouped.starts.begin(), grouped.starts.end() - 1);
  for (int64_t i = 0; i < pairs; i++) grouped.places[i] = ids[i] == kElsewhere ? kElsewhere : next[ids[i]]++;
  return grouped;
}

struct Item {
  int64_t expert, begin, end;  // columns of its result
};

// Work items that compute `columns` results of each row, from `inner` inputs each.
std::vector<Item> items_of(const Grouped& grouped, int64_t columns, int64_t inner) {
  std::vector<Item> items;
  for (int64_t e = 0; e + 1 < int64_t(grouped.starts.size()); e++) {
    const int64_t rows = grouped.starts[e + 1] - grouped.starts[e];
    if (rows == 0) continue;
    const int64_t span = (kItemProducts / std::max<int64_t>(1, rows * inner) / kItemColumns + 1) * kItemColumns;
    for (int64_t begin = 0; begin < columns; begin += span)
      items.push_back({e, begin, std::min(columns, begin + span)});
  }
  return items;
}

// The product of an expert's rows: x [P, inner] and out [P, columns] hold those of all experts.
Linear product_of(const Grouped& grouped, int64_t expert, const at::Tensor& x, const at::Tensor& weight,
                  const at::Tensor& out) {
  const int64_t first = grouped.starts[expert], element = weight.element_size();
  Linear l{};
  l.type = type_of(weight, "weight");
  l.rows = grouped.starts[expert + 1] - first;
  l.inner = x.size(1);
  l.x = x.const_data_ptr<float>() + first * l.inner;
  l.x_stride = l.inner;
  l.weight = static_cast<const char*>(weight.const_data_ptr()) + expert * weight.stride(0) * element;
  l.weight_stride = weight.stride(1);
  l.out = static_cast<char*>(out.data_ptr()) + first * out.size(1) * element;
  l.out_stride = out.size(1);
  return l;
}

Activation activation_of(c10::string_view name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  TORCH_CHECK(name == "relu2", "activation is ", name, "; allowed: silu, gelu, relu2");
  return Activation::kSquaredRelu;
}

// x, in float32, once for each expert of each token.
at::Tensor gather(const Grouped& grouped, const at::Tensor& x) {
  const at::Tensor rows = x.to(at::kFloat).contiguous();
  const int64_t pairs = grouped.places.size(), each = x.size(0) ? pairs / x.size(0) : 0, size = x.size(1);
  at::Tensor gathered = unfilled({grouped.starts.back(), size}, rows.scalar_type());
  const float* from = rows.const_data_ptr<float>();
  float* to = gathered.data_ptr<float>();
  for (int64_t i = 0; i < pairs; i++)
    if (grouped.places[i] != kElsewhere)
      memcpy(to + grouped.places[i] * size, from + i / each * size, size * sizeof(float));
  return gathered;
}

at::Tensor experts(const at::Tensor& x, const at::Tensor& up, const at::Tensor& down, const at::Tensor& ids,
                   const at::Tensor& weights, c10::string_view name) {
  const Activation activation = activation_of(name);
  TORCH_CHECK(x.dim() == 2 && up.dim() == 3 && down.dim() == 3, "x is ", x.sizes(), ", up ", up.sizes(), ", down ",
              down.sizes(), "; [T, H], [E, U, H] and [E, H, I] are needed");
  const int64_t tokens = x.size(0), size = x.size(1), inner = down.size(2);
  const bool gated = activation != Activation::kSquaredRelu;
  TORCH_CHECK(up.size(0) == down.size(0) && up.size(2) == size && down.size(1) == size &&
                  up.size(1) == (gated ? 2 : 1) * inner && dense(up) && dense(down),
              "x is ", x.sizes(), ", up ", up.sizes(), ", down ", down.sizes(), "; they do not fit ", name);
  TORCH_CHECK(x.scalar_type() == up.scalar_type() && x.scalar_type() == down.scalar_type(), "x is ", x.scalar_type(),
              ", up ", up.scalar_type(), ", down ", down.scalar_type());
  TORCH_CHECK(ids.dim() == 2 && ids.size(0) == tokens && weights.sizes() == ids.sizes(), "ids are ", ids.sizes(),
              " and weights ", weights.sizes(), " for ", tokens, " rows; [T, K] is needed");
  at::Tensor out = unfilled({tokens, size}, x.scalar_type());
  const int64_t pairs = ids.numel();
  if (pairs == 0 || size == 0) return out.zero_();
  const at::Tensor chosen = ids.to(at::kLong).contiguous(), factors = weights.to(at::kFloat).contiguous();
  const int64_t* own = chosen.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < pairs; i++)
    TORCH_CHECK(own[i] >= kElsewhere && own[i] < up.size(0), "ids[", i, "] is ", own[i], "; allowed: ", kElsewhere,
                " .. ", up.size(0) - 1);
  const Grouped grouped = group(own, pairs, up.size(0));
  const int64_t held = grouped.starts.back();

  const at::Tensor rows = gather(grouped, x);
  const at::Tensor raw = unfilled({held, up.size(1)}, x.scalar_type());
  const at::Tensor hidden = unfilled({held, inner}, rows.scalar_type());
  const Activated a{raw.const_data_ptr(), hidden.data_ptr<float>(), type_of(x, "x"), up.size(1), inner, activation};
  const std::vector<Item> ups = items_of(grouped, inner, size * (gated ? 2 : 1));
  each_item(ups.size(), [&](int64_t i, int64_t) {
    const auto [expert, begin, end] = ups[i];
    const Linear l = product_of(grouped, expert, rows, up, raw);
    kernels().linear(l, begin, end);
    if (gated) kernels().linear(l, inner + begin, inner + end);
    for (int64_t row = grouped.starts[expert]; row < grouped.starts[expert + 1]; row++)
      kernels().activate(a, row, begin, end);
  });

  const at::Tensor outs = unfilled({held, size}, x.scalar_type());
  const std::vector<Item> downs = items_of(grouped, size, inner);
  each_item(downs.size(), [&](int64_t i, int64_t) {
    const auto [expert, begin, end] = downs[i];
    kernels().linear(product_of(grouped, expert, hidden, down, outs), begin, end);
  });

  const Weighted w{outs.const_data_ptr(), out.data_ptr(), a.type, factors.const_data_ptr<float>(),
                   grouped.places.data(), ids.size(1), size};
  const int64_t grain = std::max<int64_t>(1, kItemSums / (w.count * size));
  at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) { kernels().weighted_sum(w, begin, end); });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(sglang_cpu, CPU, m) { m.impl("experts", experts); }

}  // namespace sglang_cpu
