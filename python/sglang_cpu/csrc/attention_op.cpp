// The ops paged_attention and write_and_attend: argument checks, the split into work items, the loops over them.
#include <vector>

#include "common.h"

namespace sglang_cpu {
namespace {

struct Work {
  std::vector<AttentionItem> tiles;  // each writes its output at once: some rows of a request under one KV head
  std::vector<AttentionItem> parts;  // work items: tiles, or single chunks of tiles
  int64_t partials = 0;
  bool split = false;
};

int64_t chunks_of(const AttentionItem& item) {
  return (item.key_end - 1) / kChunkKeys - item.key_begin / kChunkKeys + 1;
}

void lay_out_tiles(const Attention& a, int64_t batch, Work& work) {
  const int64_t tile = std::max<int64_t>(1, kTileRows / a.groups);
  for (int64_t b = 0; b < batch; b++) {
    const int64_t prefix = a.prefix_lens[b], rows = a.row_starts[b + 1] - a.row_starts[b];
    for (int64_t first = 0; first < rows; first += tile) {
      const int64_t count = std::min(tile, rows - first);
      const int64_t begin = a.window_left < 0 ? 0 : std::max<int64_t>(0, prefix + first - a.window_left);
      const int64_t end = prefix + (a.causal ? first + count : rows);
      for (int64_t head = 0; head < a.kv_heads; head++)
        work.tiles.push_back({b, first, count, head, begin, end, -1, -1});
    }
  }
}

// Splits tiles into chunks if one tile would keep a thread busy while the other threads are idle. The result is the
// same, bit for bit.
void split(Work& work, int64_t threads) {
  int64_t total = 0, longest = 0;
  for (const auto& tile : work.tiles) {
    total += chunks_of(tile);
    longest = std::max(longest, chunks_of(tile));
  }
  work.split = threads > 1 && longest > 1 && 4 * longest * threads > total;
  if (!work.split) {
    work.parts = work.tiles;
    return;
  }
  for (auto& tile : work.tiles) {
    tile.partial = work.partials;
    for (int64_t chunk = 0; chunk < chunks_of(tile); chunk++) {
      work.parts.push_back(tile);
      work.parts.back().chunk = tile.key_begin / kChunkKeys + chunk;
    }
    work.partials += chunks_of(tile);
  }
}

void run(Attention& a, int64_t batch) {
  const Kernels& kernel = kernels();
  Work work;
  lay_out_tiles(a, batch, work);
  split(work, at::in_parallel_region() ? 1 : at::get_num_threads());
  const int64_t memory = kernel.attention_workspace(a);
  const at::Tensor workspace = unfilled({at::get_num_threads(), memory}, at::kFloat);
  float* base = workspace.data_ptr<float>();
  a.partial_rows = std::max(kTileRows / a.groups, int64_t(1)) * a.groups;
  at::Tensor partials;
  if (work.split) {
    int64_t rows = 0;  // rows of the largest tile; a decode step has few
    for (const auto& tile : work.tiles) rows = std::max(rows, tile.rows * a.groups);
    a.partial_rows = rows;
    partials = unfilled({work.partials * rows * partial_size(a.v_dim)}, at::kFloat);
    a.partials = partials.data_ptr<float>();
  }
  std::atomic<bool> good{true};
  each_item(int64_t(work.parts.size()), [&](int64_t item, int64_t thread) {
    if (!kernel.attend(a, work.parts[item], base + thread * memory)) good = false;
  });
  TORCH_CHECK(good, "req_to_token names a slot outside the cache of ", a.slots, " slots");
  if (work.split) {
    each_item(int64_t(work.tiles.size()), [&](int64_t item, int64_t thread) {
      kernel.merge(a, work.tiles[item], base + thread * memory);
    });
  }
}

void check_rows(const Attention& a, int64_t batch, int64_t tokens, const at::Tensor& table) {
  TORCH_CHECK(a.row_starts[0] == 0 && a.row_starts[batch] == tokens, "row_starts must go from 0 to ", tokens);
  require_below(a.requests, batch, table.size(0), "req_pool_indices");
  for (int64_t b = 0; b < batch; b++) {
    const int64_t rows = a.row_starts[b + 1] - a.row_starts[b];
    TORCH_CHECK(rows >= 0 && a.prefix_lens[b] >= 0 && a.prefix_lens[b] + rows <= table.size(1), "request ", b, " has ",
                a.prefix_lens[b], " tokens and ", rows, " rows; a row of req_to_token has ", table.size(1));
  }
}

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                           const at::Tensor& req_to_token, const at::Tensor& req_pool_indices,
                           const at::Tensor& prefix_lens, const at::Tensor& row_starts, double scaling, bool causal,
                           int64_t window_left, const std::optional<at::Tensor>& sinks) {
  TORCH_CHECK(q.dim() == 3 && k_cache.dim() == 3 && v_cache.dim() == 3, "q, k_cache, v_cache need 3 dimensions");
  TORCH_CHECK(k_cache.scalar_type() == v_cache.scalar_type(), "k_cache is ", k_cache.scalar_type(), ", v_cache ",
              v_cache.scalar_type());
  TORCH_CHECK(k_cache.size(0) == v_cache.size(0) && k_cache.size(1) == v_cache.size(1) && k_cache.size(1) > 0 &&
                  q.size(1) % k_cache.size(1) == 0 && q.size(2) == k_cache.size(2),
              "shapes of q ", q.sizes(), ", k_cache ", k_cache.sizes(), ", v_cache ", v_cache.sizes());
  require_table(req_to_token);
  const int64_t batch = req_pool_indices.numel();
  at::Tensor out = unfilled({q.size(0), q.size(1), v_cache.size(2)}, q.scalar_type());
  Attention a{};
  a.q = view_of(q, "q");
  a.k = view_of(k_cache, "k_cache");
  a.v = view_of(v_cache, "v_cache");
  a.out = view_of(out, "out");
  a.table = req_to_token.const_data_ptr<int32_t>();
  a.table_stride = req_to_token.stride(0);
  a.requests = ids_of(req_pool_indices, "req_pool_indices", batch);
  a.prefix_lens = ids_of(prefix_lens, "prefix_lens", batch);
  a.row_starts = ids_of(row_starts, "row_starts", batch + 1);
  a.slots = k_cache.size(0);
  a.kv_heads = k_cache.size(1);
  a.groups = q.size(1) / k_cache.size(1);
  a.dim = q.size(2);
  a.v_dim = v_cache.size(2);
  a.scaling = float(scaling);
  a.causal = causal;
  a.window_left = window_left < 0 ? -1 : window_left;
  if (sinks) {
    TORCH_CHECK(sinks->scalar_type() == at::kFloat && sinks->is_contiguous() && sinks->numel() == q.size(1),
                "sinks is ", sinks->scalar_type(), sinks->sizes(), "; float32 of [", q.size(1), "] is needed");
    a.sinks = sinks->const_data_ptr<float>();
  }
  check_rows(a, batch, q.size(0), req_to_token);
  if (out.numel() > 0 && a.groups > 0) run(a, batch);
  return out;
}

// Copies the rows of `from` ([T, Hkv, D]) to their slots.
void write_rows(const at::Tensor& from, const int64_t* slots, const at::Tensor& cache, const char* name) {
  TORCH_CHECK(from.scalar_type() == cache.scalar_type(), name, " is ", from.scalar_type(), ", its cache ",
              cache.scalar_type());
  const View in = view_of(from, name), out = view_of(cache, name);
  for (int64_t row = 0; row < from.size(0); row++)
    copy_heads(in, out, row, slots[row], cache.size(1), cache.size(2), cache.element_size());
}

at::Tensor write_and_attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& slots,
                            const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& req_to_token,
                            const at::Tensor& req_pool_indices, const at::Tensor& prefix_lens,
                            const at::Tensor& row_starts, double scaling, bool causal, int64_t window_left,
                            const std::optional<at::Tensor>& sinks) {
  TORCH_CHECK(k_cache.dim() == 3 && v_cache.dim() == 3 && k_cache.size(0) == v_cache.size(0), "shapes of k_cache ",
              k_cache.sizes(), ", v_cache ", v_cache.sizes());
  TORCH_CHECK(q.dim() == 2 || q.dim() == 3, "q has shape ", q.sizes(), "; 2 or 3 dimensions are needed");
  const int64_t rows = q.size(0), heads = k_cache.size(1), dim = k_cache.size(2);
  const int64_t q_size = q.size(1) * (q.dim() == 3 ? q.size(2) : 1);
  TORCH_CHECK(dim > 0 && q_size % dim == 0, "q has shape ", q.sizes(), ", a key ", dim, " elements");
  const int64_t q_heads = q_size / dim;
  const int64_t* slot = ids_of(slots, "slots", rows);
  require_below(slot, rows, k_cache.size(0), "slots");
  write_rows(k.view({rows, heads, dim}), slot, k_cache, "k");
  write_rows(v.view({rows, v_cache.size(1), v_cache.size(2)}), slot, v_cache, "v");
  return paged_attention(q.view({rows, q_heads, dim}), k_cache, v_cache, req_to_token, req_pool_indices, prefix_lens,
                         row_starts, scaling, causal, window_left, sinks)
      .view({rows, q_heads * v_cache.size(2)});
}

}  // namespace

TORCH_LIBRARY_IMPL(sglang_cpu, CPU, m) {
  m.impl("paged_attention", paged_attention);
  m.impl("write_and_attend", write_and_attend);
}

}  // namespace sglang_cpu
