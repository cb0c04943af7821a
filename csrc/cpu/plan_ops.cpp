// Ops that plan which proposed rows are verified: chances of acceptance and what they learn, best-first trees, rows.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>
#include <vector>

#include "common.h"

namespace sglang_dflash {
namespace {

// The parameters of Platt scaling, each a row of (value, information): of all requests, then of single ones.
struct Parameters {
  enum Shared { kSlope, kOthers, kDepths };

  Parameters(const at::Tensor& shared, const at::Tensor& own, at::IntArrayRef places, const at::Tensor& log_probs) {
    TORCH_CHECK(log_probs.scalar_type() == at::kFloat && log_probs.dim() == 3 && log_probs.is_contiguous() &&
                    int64_t(places.size()) == log_probs.size(0),
                "log_probs are ", log_probs.scalar_type(), log_probs.sizes(), " for ", places.size(),
                " requests; dense float32 of [b, D, k] is needed");
    for (const at::Tensor* t : {&shared, &own})
      TORCH_CHECK(t->scalar_type() == at::kDouble && t->dim() == 2 && t->is_contiguous() && t->size(1) == 2,
                  "parameters are ", t->scalar_type(), t->sizes(), "; dense float64 of [P, 2] is needed");
    TORCH_CHECK(shared.size(0) >= kDepths + log_probs.size(1), shared.size(0), " shared parameters for ",
                log_probs.size(1), " depths");
    for (const int64_t place : places)
      TORCH_CHECK(place >= -1 && place < own.size(0), "a place is ", place, "; allowed: -1 .. ", own.size(0) - 1);
    this->shared = shared.data_ptr<double>();
    this->own = own.data_ptr<double>();
  }

  double value(int64_t parameter) const { return shared[2 * parameter]; }
  double value_of(int64_t place) const { return place < 0 ? 0 : own[2 * place]; }

  double *shared, *own;
};

// log(p / (1 - p)), within +-bound.
double logit(double log_prob, double bound) {
  const double bounded = std::min(std::max(log_prob, -bound), -1e-6);
  return std::min(std::max(bounded - std::log1p(-std::exp(bounded)), -bound), bound);
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

at::Tensor platt(const at::Tensor& log_probs, const at::Tensor& shared, const at::Tensor& own, at::IntArrayRef places,
                 double max_logit) {
  const Parameters parameters(shared, own, places, log_probs);
  at::Tensor chances = unfilled(log_probs.sizes(), at::kFloat);
  const int64_t batch = log_probs.size(0), depths = log_probs.size(1), ranks = log_probs.size(2);
  const double slope = parameters.value(Parameters::kSlope), others = parameters.value(Parameters::kOthers);
  const float* log_prob = log_probs.const_data_ptr<float>();
  float* chance = chances.data_ptr<float>();
  for (int64_t b = 0; b < batch; b++) {
    for (int64_t d = 0; d < depths; d++) {
      const double offset = parameters.value(Parameters::kDepths + d) + parameters.value_of(places[b]);
      for (int64_t j = 0; j < ranks; j++, log_prob++, chance++) {
        const bool known = *log_prob > -INFINITY;  // and not NaN
        *chance = known ? float(sigmoid(slope * logit(*log_prob, max_logit) + offset + (j > 0 ? others : 0))) : 0;
        if (j > 0) *chance = std::min(*chance, *(chance - 1));
      }
    }
  }
  return chances;
}

// tuning: prior and trials of the slope, of depths and other candidates, and of requests; damping; max_logit.
void platt_step(const at::Tensor& shared, const at::Tensor& own, at::IntArrayRef places, at::IntArrayRef drafted,
                const at::Tensor& row_starts, const at::Tensor& parents, const at::Tensor& depths,
                const at::Tensor& ranks, const at::Tensor& path, const at::Tensor& log_probs,
                at::ArrayRef<double> tuning) {
  const Parameters parameters(shared, own, places, log_probs);
  const int64_t count = parents.numel(), batch = row_starts.numel() - 1, depth_count = log_probs.size(1);
  const int64_t rank_count = log_probs.size(2), length = path.size(-1);
  TORCH_CHECK(tuning.size() == 8, tuning.size(), " tuning values; 8 are needed");
  for (const at::Tensor* t : {&parents, &depths, &ranks})
    TORCH_CHECK(t->scalar_type() == at::kInt && t->is_contiguous() && t->numel() == count, "rows are ",
                t->scalar_type(), t->sizes(), "; dense int32 of [", count, "] is needed");
  TORCH_CHECK(path.scalar_type() == at::kLong && path.dim() == 2 && path.is_contiguous() && path.size(0) == batch,
              "path is ", path.scalar_type(), path.sizes(), "; dense int64 of [", batch, ", L] is needed");
  const int64_t *start = ids_of(row_starts, "row_starts", batch + 1), *step = path.const_data_ptr<int64_t>();
  const int32_t *parent = parents.const_data_ptr<int32_t>(), *depth = depths.const_data_ptr<int32_t>();
  const int32_t* rank = ranks.const_data_ptr<int32_t>();
  const float* log_prob = log_probs.const_data_ptr<float>();
  const double damping = tuning[6], max_logit = tuning[7];
  auto learn = [&](double* parameter, double gradient, double information, int64_t kind) {
    parameter[1] += information - parameter[1] / tuning[2 * kind + 1];
    const double value = parameter[0] + damping * gradient / (parameter[1] + tuning[2 * kind]);
    parameter[0] = std::min(std::max(value, -max_logit), max_logit);
  };
  double* slope = parameters.shared + 2 * Parameters::kSlope;
  double* others = parameters.shared + 2 * Parameters::kOthers;
  std::vector<bool> accepted;
  for (size_t i = 0; i < drafted.size(); i++) {
    TORCH_CHECK(drafted[i] >= 0 && drafted[i] < batch && places[i] >= 0, "request ", drafted[i], " of ", batch,
                " has the place ", places[i]);
    const int64_t first = start[drafted[i]], rows = start[drafted[i] + 1] - first;
    TORCH_CHECK(first >= 0 && rows >= 1 && first + rows <= count, "request ", drafted[i], " has ", rows, " rows");
    accepted.assign(rows, false);
    for (int64_t j = 0; j < length; j++) {
      const int64_t row = step[drafted[i] * length + j] - first;
      TORCH_CHECK(row >= 0 && row < rows, "a path of request ", drafted[i], " holds row ", row, " of ", rows);
      accepted[row] = true;
    }
    double* request = parameters.own + 2 * places[i];
    for (int64_t row = 1; row < rows; row++) {
      const int32_t from = parent[first + row], d = depth[first + row] - 1, r = rank[first + row];
      TORCH_CHECK(from >= 0 && from < row && d >= 0 && d < depth_count && r >= 0 && r < rank_count, "row ", row,
                  " of request ", drafted[i], " has parent ", from, ", depth ", d + 1, " and rank ", r);
      if (!accepted[from]) continue;
      const float said = log_prob[(int64_t(i) * depth_count + d) * rank_count + r];
      if (!(said > -INFINITY)) continue;  // or NaN: nothing was said
      double* of_depth = parameters.shared + 2 * (Parameters::kDepths + d);
      const double x = logit(said, max_logit);
      const double chance = sigmoid(slope[0] * x + of_depth[0] + request[0] + (r > 0 ? others[0] : 0));
      const double surplus = accepted[row] - chance, information = chance * (1 - chance) + 1e-4;
      learn(slope, surplus * x, information * x * x, 0);
      slope[0] = std::min(std::max(slope[0], 0.1), 4.0);
      learn(of_depth, surplus, information, 1);
      learn(request, surplus, information, 2);
      if (r > 0) learn(others, surplus, information, 1);
    }
  }
}

// `places` and `drafted` hold the requests of all steps one after the other. Steps before a wrong one are learned.
void platt_steps(at::Tensor& shared, at::Tensor& own, at::IntArrayRef places, at::IntArrayRef drafted,
                 at::TensorList row_starts, at::TensorList parents, at::TensorList depths, at::TensorList ranks,
                 at::TensorList paths, at::TensorList log_probs, at::ArrayRef<double> tuning) {
  for (const at::TensorList* list : {&row_starts, &parents, &depths, &ranks, &paths})
    TORCH_CHECK(list->size() == log_probs.size(), "a list has ", list->size(), " of ", log_probs.size(), " steps");
  TORCH_CHECK(drafted.size() == places.size(), drafted.size(), " drafted requests, ", places.size(), " places");
  const auto steps = places_of_steps(places, log_probs, "log_probs");
  const auto requests = places_of_steps(drafted, log_probs, "log_probs");
  for (size_t i = 0; i < steps.size(); i++)
    platt_step(shared, own, steps[i], requests[i], row_starts[i], parents[i], depths[i], ranks[i], paths[i],
               log_probs[i], tuning);
}

struct Node {
  float reach;
  int64_t order;  // of two with equal reach, the earlier found comes first
  int32_t parent, depth, rank;
  bool operator<(const Node& other) const {
    return reach != other.reach ? reach < other.reach : order > other.order;
  }
};

using Trees = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Trees best_first(const at::Tensor& chances, int64_t rows) {
  TORCH_CHECK(chances.scalar_type() == at::kFloat && chances.dim() == 3 && chances.is_contiguous() && rows >= 1,
              "chances are ", chances.scalar_type(), chances.sizes(), " and rows is ", rows,
              "; dense float32 of [B, D, k] and at least one row are needed");
  const int64_t batch = chances.size(0), depths_count = chances.size(1), ranks_count = chances.size(2);
  at::Tensor parents = unfilled({batch, rows}, at::kInt), depths = unfilled({batch, rows}, at::kInt);
  at::Tensor ranks = unfilled({batch, rows}, at::kInt), reaches = unfilled({batch, rows}, at::kFloat);
  const float* chance = chances.const_data_ptr<float>();
  int32_t *parent = parents.data_ptr<int32_t>(), *depth = depths.data_ptr<int32_t>();
  int32_t* rank = ranks.data_ptr<int32_t>();
  float* reach = reaches.data_ptr<float>();
  for (int64_t b = 0; b < batch; b++, parent += rows, depth += rows, rank += rows, reach += rows) {
    const float* own = chance + b * depths_count * ranks_count;
    std::priority_queue<Node> open;
    int64_t found = 0;
    auto find = [&](int32_t from, int32_t at_depth, int32_t at_rank) {
      if (at_depth > depths_count || at_rank >= ranks_count) return;
      const float value = reach[from] * own[(at_depth - 1) * ranks_count + at_rank];
      if (value > 0) open.push({value, found++, from, at_depth, at_rank});
    };
    for (int32_t row = 0; row < rows; row++) {
      if (row == 0) {
        parent[0] = rank[0] = -1;
        depth[0] = 0;
        reach[0] = 1;
      } else if (open.empty()) {
        parent[row] = rank[row] = -1;
        depth[row] = 0;
        reach[row] = 0;
        continue;
      } else {
        const Node node = open.top();
        open.pop();
        parent[row] = node.parent;
        depth[row] = node.depth;
        rank[row] = node.rank;
        reach[row] = node.reach;
        find(node.parent, node.depth, node.rank + 1);
      }
      find(row, depth[row] + 1, 0);
    }
  }
  return {parents, depths, ranks, reaches};
}

using Rows = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t>;

// The first `lens` rows of each drafted request's tree, and the anchors of all others.
Rows take_rows(
    const at::Tensor& parents, const at::Tensor& depths, const at::Tensor& ranks, at::IntArrayRef drafted,
    at::IntArrayRef lens, int64_t batch) {
  const int64_t trees = int64_t(drafted.size()), stride = trees == 0 ? 1 : parents.size(1);
  for (const at::Tensor* t : {&parents, &depths, &ranks})
    TORCH_CHECK(t->scalar_type() == at::kInt && t->dim() == 2 && t->is_contiguous() && t->sizes() == parents.sizes() &&
                    t->size(0) == trees,
                "trees are ", t->scalar_type(), t->sizes(), "; dense int32 of [", trees, ", R] is needed");
  TORCH_CHECK(int64_t(lens.size()) == trees, lens.size(), " lens for ", trees, " trees");
  int64_t total = batch, width = 1, before = -1;
  for (int64_t i = 0; i < trees; i++) {
    TORCH_CHECK(drafted[i] > before && drafted[i] < batch && lens[i] >= 1 && lens[i] <= stride, "tree ", i,
                " is of request ", drafted[i], " and has ", lens[i], " rows");
    before = drafted[i];
    total += lens[i] - 1;
    width = std::max(width, lens[i]);
  }
  at::Tensor out[3] = {unfilled({total}, at::kInt), unfilled({total}, at::kInt), unfilled({total}, at::kInt)};
  at::Tensor requests = unfilled({total}, at::kLong), row_starts = unfilled({batch + 1}, at::kLong);
  const int32_t* from[3] = {parents.const_data_ptr<int32_t>(), depths.const_data_ptr<int32_t>(),
                            ranks.const_data_ptr<int32_t>()};
  int32_t* field[3] = {out[0].data_ptr<int32_t>(), out[1].data_ptr<int32_t>(), out[2].data_ptr<int32_t>()};
  int64_t *request = requests.data_ptr<int64_t>(), *start = row_starts.data_ptr<int64_t>();
  int64_t row = 0, tree = 0, length = 1;
  bool chains = true;
  for (int64_t b = 0; b < batch; b++) {
    start[b] = row;
    const bool own = tree < trees && drafted[tree] == b;
    const int64_t count = own ? lens[tree] : 1;
    for (int64_t i = 0; i < count; i++, row++) {
      request[row] = b;
      for (int64_t f = 0; f < 3; f++)
        field[f][row] = own ? from[f][tree * stride + i] : f == 1 ? 0 : -1;
      const int64_t depth = field[1][row];
      chains &= depth == i;
      length = std::max(length, depth + 1);
    }
    tree += own;
  }
  start[batch] = row;
  at::Tensor masks = unfilled({chains ? 0 : batch, width, width}, at::kBool);
  if (!chains) std::fill_n(masks.data_ptr<bool>(), masks.numel(), false);
  for (int64_t b = 0; !chains && b < batch; b++) {
    bool* mask = masks.data_ptr<bool>() + b * width * width;
    for (int64_t i = 0; i < start[b + 1] - start[b]; i++) {
      const int64_t parent = field[0][start[b] + i];
      TORCH_CHECK(parent < i, "row ", i, " of request ", b, " has the parent ", parent);
      if (parent >= 0) std::copy_n(mask + parent * width, width, mask + i * width);
      mask[i * width + i] = true;
    }
  }
  return {out[0], out[1], out[2], requests, row_starts, masks, length};
}

// A draft's log-probabilities to the rows that are verified. The tuple holds the chances, the fields of the trees,
// those of the rows, the rows of each tree, the sum of their depths, and the drafts that should be accepted.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
           at::Tensor, at::Tensor, int64_t, std::vector<int64_t>, int64_t, double>
plan_rows(const at::Tensor& log_probs, const at::Tensor& shared, const at::Tensor& own, at::IntArrayRef places,
          double max_logit, int64_t max_rows, double least, at::IntArrayRef drafted, int64_t batch) {
  const at::Tensor chances = platt(log_probs, shared, own, places, max_logit);
  const auto [parents, depths, ranks, reaches] = best_first(chances, max_rows);
  const float* reach = reaches.const_data_ptr<float>();
  const int32_t* depth = depths.const_data_ptr<int32_t>();
  std::vector<int64_t> lens(log_probs.size(0));
  int64_t deepest = 0;
  double promised = 0;
  for (int64_t& count : lens) {
    count = std::count_if(reach, reach + max_rows, [&](float each) { return each > least; });
    count = std::max<int64_t>(count, 1);
    deepest += *std::max_element(depth, depth + count);
    promised = std::accumulate(reach + 1, reach + count, promised);
    reach += max_rows;
    depth += max_rows;
  }
  const auto [of, at, rank, requests, starts, masks, length] = take_rows(parents, depths, ranks, drafted, lens, batch);
  return {chances,  parents, depths, ranks,  reaches, of,      at,      rank,
          requests, starts,  masks,  length, lens,    deepest, promised};
}

}  // namespace

TORCH_LIBRARY_IMPL(sglang_dflash, CPU, m) {
  m.impl("platt", platt);
  m.impl("platt_steps", platt_steps);
  m.impl("best_first", best_first);
  m.impl("take_rows", take_rows);
  m.impl("plan_rows", plan_rows);
}

}  // namespace sglang_dflash
