// Ops over the rows that a step proposes and verifies: the best candidates of each row, layout, acceptance, commit.
#include <algorithm>

#include "host_ops.h"
#include "logits.h"

namespace sglang_dflash {
namespace {

void clear(Top& top) {
  std::fill_n(top.values, top.count, -INFINITY);
  std::fill_n(top.ids, top.count, int64_t(-1));
  top.maximum = -INFINITY;
  top.sum = 0;
}

// Adds the candidates and the softmax sum of later columns.
void add(Top& top, const Top& later) {
  for (int64_t i = 0; i < later.count && later.ids[i] >= 0; i++) insert(top, later.values[i], later.ids[i]);
  const float maximum = std::max(top.maximum, later.maximum);
  if (maximum == -INFINITY) return;
  top.sum = top.sum * std::exp(top.maximum - maximum) + later.sum * std::exp(later.maximum - maximum);
  top.maximum = maximum;
}

// Walks every request's tree: `target(row)` is the target's token after a row.
template <typename Target>
Four walk(const at::Tensor& ids, const at::Tensor& parents, const at::Tensor& row_starts, int64_t length, int64_t cost,
          Target target) {
  const int64_t count = ids.numel(), batch = row_starts.numel() - 1;
  const int64_t* id = ids_of(ids, "ids", count);
  const int64_t* start = ids_of(row_starts, "row_starts", batch + 1);
  TORCH_CHECK(parents.scalar_type() == at::kInt && dense_on_cpu(parents) && parents.numel() == count, "parents are ",
              parents.scalar_type(), parents.sizes(), "; int32 of [", count, "] is needed");
  const int32_t* parent = parents.const_data_ptr<int32_t>();
  TORCH_CHECK(batch >= 0 && start[0] == 0 && start[batch] == count, "row_starts must go from 0 to ", count);
  for (int64_t b = 0; b < batch; b++) TORCH_CHECK(start[b] < start[b + 1], "request ", b, " has no rows");
  for (int64_t b = 0; b < batch; b++) {
    for (int64_t row = start[b]; row < start[b + 1]; row++)
      TORCH_CHECK(row == start[b] ? parent[row] == -1 : parent[row] >= 0 && parent[row] < row - start[b], "row ",
                  row - start[b], " of request ", b, " has the parent ", parent[row]);
  }
  at::Tensor out_ids = unfilled({batch, length}, at::kLong), bonus_ids = unfilled({batch}, at::kLong);
  at::Tensor commit_lens = unfilled({batch}, at::kInt), path_rows = unfilled({batch, length}, at::kLong);
  int64_t *out = out_ids.data_ptr<int64_t>(), *bonus = bonus_ids.data_ptr<int64_t>();
  int64_t* path = path_rows.data_ptr<int64_t>();
  int32_t* lens = commit_lens.data_ptr<int32_t>();
  std::atomic<bool> fits{true};
  each_of_logits(batch, cost, [&](int64_t b) {
    const int64_t first = start[b], end = start[b + 1];
    std::fill_n(path + b * length, length, first);
    std::fill_n(out + b * length, length, int64_t(0));
    int64_t row = first, depth = 0;
    for (;; depth++) {
      if (depth == length) {
        fits = false;
        break;
      }
      path[b * length + depth] = row;
      bonus[b] = out[b * length + depth] = target(row);
      int64_t next = row + 1;
      while (next < end && !(parent[next] == row - first && id[next] == bonus[b])) next++;
      if (next == end) break;
      row = next;
    }
    lens[b] = int32_t(depth + 1);
  });
  TORCH_CHECK(fits, "a path is longer than ", length);
  return {out_ids, commit_lens, bonus_ids, path_rows};
}

void require_paths(const at::Tensor& req_to_token, const at::Tensor& path, const at::Tensor& commit_lens) {
  require_table(req_to_token);
  TORCH_CHECK(path.scalar_type() == at::kLong && path.dim() == 2 && dense_on_cpu(path) &&
                  path.size(0) == commit_lens.numel() && commit_lens.scalar_type() == at::kInt &&
                  dense_on_cpu(commit_lens),
              "path is ", path.scalar_type(), path.sizes(), ", commit_lens ", commit_lens.scalar_type(),
              commit_lens.sizes());
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> top_log_probs(const at::Tensor& logits, int64_t count) {
  TORCH_CHECK(logits.dim() == 2 && dense(logits) && count >= 1 && count <= logits.size(1), "logits are ",
              logits.sizes(), " with strides ", logits.strides(), " and count is ", count,
              "; [N, V] with dense rows and a count of 1 .. V are needed");
  constexpr int64_t kSpan = 16384;
  const int64_t rows = logits.size(0), vocabulary = logits.size(1), element = logits.element_size();
  const Type type = type_of(logits, "logits");
  at::Tensor ids = unfilled({rows, count}, at::kLong);
  at::Tensor log_probs = unfilled({rows, count}, at::kFloat);
  const char* base = static_cast<const char*>(logits.const_data_ptr());
  int64_t* id = ids.data_ptr<int64_t>();
  float* log_prob = log_probs.data_ptr<float>();
  each_of_logits(rows, vocabulary, [&](int64_t row) {
    const char* values = base + row * logits.stride(0) * element;
    const int64_t spans = (vocabulary + kSpan - 1) / kSpan;
    std::vector<float> held(spans * count);
    std::vector<int64_t> held_ids(spans * count);
    std::vector<Top> tops(spans);
    at::parallel_for(0, spans, 2, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        Top& top = tops[i] = Top{held.data() + i * count, held_ids.data() + i * count, count, 0, 0};
        clear(top);
        const int64_t first = i * kSpan;
        kernels().top(values + first * element, type, first, std::min(kSpan, vocabulary - first), top);
      }
    });
    Top& top = tops[0];
    for (int64_t i = 1; i < spans; i++) add(top, tops[i]);
    const float total = top.maximum + std::log(top.sum);
    int64_t unused = 0;  // an id that is not among the best, where all others are -inf or NaN
    for (int64_t i = 0; i < count; i++) {
      while (top.ids[i] < 0) {
        if (std::find(top.ids, top.ids + count, unused) == top.ids + count) top.ids[i] = unused;
        unused++;
      }
      const float value = top.values[i] - total;
      id[row * count + i] = top.ids[i];
      log_prob[row * count + i] = value == value ? value : -INFINITY;
    }
  });
  return {ids, log_probs};
}

Four accept_tree(const at::Tensor& target_ids, const at::Tensor& ids, const at::Tensor& parents,
                 const at::Tensor& row_starts, int64_t length) {
  const int64_t* chosen = ids_of(target_ids, "target_ids", ids.numel());
  return walk(ids, parents, row_starts, length, 1, [&](int64_t row) { return chosen[row]; });
}

Four accept_tree_greedy(const at::Tensor& logits, const at::Tensor& ids, const at::Tensor& parents,
                        const at::Tensor& row_starts, int64_t length) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && dense(logits) && logits.size(0) >= ids.numel(),
              "logits are ", logits.sizes(), " with strides ", logits.strides(), "; [", ids.numel(),
              ", V] with dense rows is needed");
  const Type type = type_of(logits, "logits");
  const int64_t vocabulary = logits.size(1), element = logits.element_size(), stride = logits.stride(0) * element;
  const char* base = static_cast<const char*>(logits.const_data_ptr());
  return walk(ids, parents, row_starts, length, vocabulary,
              [&](int64_t row) { return argmax_of(base + row * stride, type, vocabulary, element); });
}

Three lay_out_trees(const at::Tensor& depths, const at::Tensor& ranks, const at::Tensor& requests,
                    const at::Tensor& row_starts, at::IntArrayRef drafted, const at::Tensor& candidate_ids,
                    const at::Tensor& bonus_ids, const at::Tensor& prefix_lens, const at::Tensor& req_pool_indices,
                    const at::Tensor& req_to_token) {
  require_table(req_to_token);
  const int64_t rows = requests.numel(), batch = bonus_ids.numel();
  const at::Tensor indices = req_pool_indices.to(at::kLong), prefixes = prefix_lens.to(at::kLong);
  const int64_t *request = ids_of(requests, "requests", rows), *start = ids_of(row_starts, "row_starts", batch + 1);
  const int64_t *bonus = ids_of(bonus_ids, "bonus_ids", batch), *prefix = ids_of(prefixes, "prefix_lens", batch);
  const int64_t* index = ids_of(indices, "req_pool_indices", batch);
  for (const at::Tensor* t : {&depths, &ranks})
    TORCH_CHECK(t->scalar_type() == at::kInt && dense_on_cpu(*t) && t->numel() == rows, "depths and ranks are ",
                depths.scalar_type(), depths.sizes(), " and ", ranks.scalar_type(), ranks.sizes(), "; int32 of [", rows,
                "] is needed");
  require_below(request, rows, batch, "requests");
  require_below(index, batch, req_to_token.size(0), "req_pool_indices");
  TORCH_CHECK(candidate_ids.scalar_type() == at::kLong && candidate_ids.dim() == 3 && dense_on_cpu(candidate_ids) &&
                  candidate_ids.size(0) == int64_t(drafted.size()),
              "candidate_ids are ", candidate_ids.scalar_type(), candidate_ids.sizes(), "; dense int64 of [",
              drafted.size(), ", D, k] is needed");
  const int64_t depth_count = candidate_ids.size(1), rank_count = candidate_ids.size(2);
  std::vector<int64_t> tree_of(batch, -1);
  for (size_t i = 0; i < drafted.size(); i++) {
    TORCH_CHECK(drafted[i] >= 0 && drafted[i] < batch, "drafted[", i, "] is ", drafted[i]);
    tree_of[drafted[i]] = int64_t(i);
  }
  const int32_t *depth = depths.const_data_ptr<int32_t>(), *rank = ranks.const_data_ptr<int32_t>();
  const int64_t* candidate = candidate_ids.const_data_ptr<int64_t>();
  at::Tensor ids = unfilled({rows}, at::kLong), positions = unfilled({rows}, at::kLong);
  at::Tensor slots = unfilled({rows}, at::kLong);
  int64_t *id = ids.data_ptr<int64_t>(), *position = positions.data_ptr<int64_t>(), *slot = slots.data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; row++) {
    const int64_t b = request[row], place = prefix[b] + row - start[b];
    TORCH_CHECK(place >= 0 && place < req_to_token.size(1), "request ", b, " has ", prefix[b], " tokens and a row ",
                row - start[b], "; a row of req_to_token has ", req_to_token.size(1));
    if (rank[row] < 0) {
      id[row] = bonus[b];
    } else {
      TORCH_CHECK(tree_of[b] >= 0 && depth[row] >= 1 && depth[row] <= depth_count && rank[row] < rank_count, "row ",
                  row, " is candidate ", rank[row], " of depth ", depth[row]);
      id[row] = candidate[(tree_of[b] * depth_count + depth[row] - 1) * rank_count + rank[row]];
    }
    position[row] = prefix[b] + depth[row];
    slot[row] = req_to_token.const_data_ptr<int32_t>()[index[b] * req_to_token.stride(0) + place];
  }
  return {ids, positions, slots};
}

void exchange_slots(const at::Tensor& req_to_token, const at::Tensor& req_pool_indices, const at::Tensor& prefix_lens,
                    const at::Tensor& path, const at::Tensor& commit_lens, const at::Tensor& row_starts) {
  require_paths(req_to_token, path, commit_lens);
  const int64_t batch = commit_lens.numel(), length = path.size(1);
  const int64_t* request = ids_of(req_pool_indices, "req_pool_indices", batch);
  const int64_t* prefix = ids_of(prefix_lens, "prefix_lens", batch);
  const int64_t* start = ids_of(row_starts, "row_starts", batch + 1);
  const int32_t* lens = commit_lens.const_data_ptr<int32_t>();
  const int64_t* taken = path.const_data_ptr<int64_t>();
  require_below(request, batch, req_to_token.size(0), "req_pool_indices");
  std::vector<int32_t> old;
  for (int64_t b = 0; b < batch; b++, taken += length) {
    const int64_t rows = start[b + 1] - start[b];
    TORCH_CHECK(lens[b] >= 1 && lens[b] <= std::min(length, rows) && prefix[b] >= 0 &&
                    prefix[b] + rows <= req_to_token.size(1),
                "request ", b, " commits ", lens[b], " of ", rows, " rows behind ", prefix[b], " tokens");
    int32_t* slots = req_to_token.data_ptr<int32_t>() + request[b] * req_to_token.stride(0) + prefix[b];
    old.assign(slots, slots + rows);
    for (int64_t i = 0, last = -1; i < lens[b]; i++) {
      const int64_t row = taken[i] - start[b];
      TORCH_CHECK(row > last && row < rows, "row ", i, " of the path of request ", b, " is ", row);
      slots[i] = old[row];
      last = row;
    }
    int64_t next = 0;  // the first row that neither the path nor an earlier place takes; a path never goes back
    for (int64_t i = lens[b], on_path = 0; i < rows; i++, next++) {
      while (on_path < lens[b] && taken[on_path] - start[b] == next) on_path++, next++;
      slots[i] = old[next];
    }
  }
}

// The accepted rows, their positions, the slots of these positions, and the rows of `hidden`.
Four committed_rows(const at::Tensor& req_to_token, const at::Tensor& req_pool_indices, const at::Tensor& prefix_lens,
                    const at::Tensor& path, const at::Tensor& commit_lens, const at::Tensor& hidden) {
  const int64_t batch = commit_lens.numel();
  require_paths(req_to_token, path, commit_lens);
  const int64_t* request = ids_of(req_pool_indices, "req_pool_indices", batch);
  const int64_t* prefix = ids_of(prefix_lens, "prefix_lens", batch);
  const int32_t* lens = commit_lens.const_data_ptr<int32_t>();
  require_below(request, batch, req_to_token.size(0), "req_pool_indices");
  TORCH_CHECK(hidden.dim() == 2 && hidden.device().is_cpu() && dense(hidden), "hidden is ", hidden.sizes(), " of ",
              hidden.device(), " with strides ", hidden.strides(), "; [T, H] with dense rows of the CPU is needed");
  int64_t total = 0;
  for (int64_t b = 0; b < batch; b++) {
    TORCH_CHECK(lens[b] >= 1 && lens[b] <= path.size(1) && prefix[b] >= 0 &&
                    prefix[b] + lens[b] <= req_to_token.size(1),
                "request ", b, " commits ", lens[b], " rows behind ", prefix[b], " tokens");
    total += lens[b];
  }
  at::Tensor rows = unfilled({total}, at::kLong), positions = unfilled({total}, at::kLong);
  at::Tensor slots = unfilled({total}, at::kLong), taken = unfilled({total, hidden.size(1)}, hidden.scalar_type());
  int64_t *row = rows.data_ptr<int64_t>(), *position = positions.data_ptr<int64_t>();
  int64_t* slot = slots.data_ptr<int64_t>();
  const int64_t* of_path = path.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; b++, of_path += path.size(1)) {
    require_below(of_path, lens[b], hidden.size(0), "path");
    const int32_t* own = req_to_token.const_data_ptr<int32_t>() + request[b] * req_to_token.stride(0) + prefix[b];
    for (int64_t i = 0; i < lens[b]; i++) *row++ = of_path[i], *position++ = prefix[b] + i, *slot++ = own[i];
  }
  const int64_t bytes = hidden.size(1) * hidden.element_size(), stride = hidden.stride(0) * hidden.element_size();
  const char* from = static_cast<const char*>(hidden.const_data_ptr());
  char* to = static_cast<char*>(taken.data_ptr());
  row = rows.data_ptr<int64_t>();
  for (int64_t i = 0; i < total; i++) memcpy(to + i * bytes, from + row[i] * stride, bytes);
  return {rows, positions, slots, taken};
}

}  // namespace sglang_dflash
