// Ops that plan which proposed rows are verified: chances of acceptance, best-first trees, rows.
#include <algorithm>
#include <queue>
#include <vector>

#include "host_ops.h"
#include "plan_tables.h"

namespace sglang_dflash {
namespace {

void require_log_probs(const at::Tensor& log_probs, const Parameters& parameters, at::IntArrayRef places) {
  TORCH_CHECK(log_probs.scalar_type() == at::kFloat && log_probs.dim() == 3 && dense_on_cpu(log_probs) &&
                  int64_t(places.size()) == log_probs.size(0),
              "log_probs are ", log_probs.scalar_type(), log_probs.sizes(), " for ", places.size(),
              " requests; dense float32 of [b, D, k] is needed");
  TORCH_CHECK(log_probs.size(1) <= parameters.depths, "parameters of ", parameters.depths, " depths for ",
              log_probs.size(1));
}

// The chances of one request's candidates, each computed when it is first asked for: a plan needs few of them.
class Chances {
 public:
  Chances(const at::Tensor& log_probs, int64_t request, const Parameters& parameters, int64_t place, double max_logit)
      : log_prob_(log_probs.const_data_ptr<float>() + request * log_probs.size(1) * log_probs.size(2)),
        ranks_(log_probs.size(2)), parameters_(parameters), offset_(parameters.value_of(place)),
        max_logit_(max_logit), known_(log_probs.size(1) * log_probs.size(2), -1.0f) {}

  // d: depth less one. Falling in the rank j.
  float at(int64_t d, int64_t j) {
    const size_t place = size_t(d * ranks_ + j);
    if (known_[place] >= 0) return known_[place];
    float chance = 0;
    const float said = log_prob_[place];
    if (said > -INFINITY) {  // and not NaN
      const double others = j > 0 ? parameters_.value(Parameters::kOthers) : 0;
      const double offset = parameters_.value(Parameters::kDepths + d) + offset_ + others;
      chance = float(sigmoid(parameters_.value(Parameters::kSlope) * logit(said, max_logit_) + offset));
    }
    if (j > 0) chance = std::min(chance, at(d, j - 1));
    return known_[place] = chance;
  }

 private:
  const float* log_prob_;
  int64_t ranks_;
  const Parameters& parameters_;
  double offset_, max_logit_;
  std::vector<float> known_;
};

struct Node {
  float reach;
  int64_t order;  // of two with equal reach, the earlier found comes first
  int32_t parent, depth, rank;
  bool operator<(const Node& other) const {
    return reach != other.reach ? reach < other.reach : order > other.order;
  }
};

// The rows of trees, `stride` for each request.
struct TreeRows {
  const int32_t *parent, *depth, *rank;
  int64_t stride;
};

// Writes the tree of one request; chance(d, j) is that of candidate j of depth d + 1.
template <typename Chance>
void grow(Chance&& chance, int64_t depths, int64_t ranks, int64_t rows, int32_t* parent, int32_t* depth, int32_t* rank,
          float* reach) {
  std::priority_queue<Node> open;
  int64_t found = 0;
  auto find = [&](int32_t from, int32_t at_depth, int32_t at_rank) {
    if (at_depth > depths || at_rank >= ranks) return;
    const float value = reach[from] * chance(at_depth - 1, at_rank);
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

// The first `lens` rows of each drafted request's tree, chains of `copied_lens` rows, and the anchors of all others.
Rows take(const TreeRows& trees, at::IntArrayRef drafted, at::IntArrayRef lens, int64_t batch, at::IntArrayRef copied,
          at::IntArrayRef copied_lens) {
  TORCH_CHECK(lens.size() == drafted.size(), lens.size(), " lens for ", drafted.size(), " trees");
  TORCH_CHECK(copied_lens.size() == copied.size(), copied_lens.size(), " lens for ", copied.size(), " copies");
  int64_t total = batch, width = 1, before = -1;
  for (size_t i = 0; i < drafted.size(); i++) {
    TORCH_CHECK(drafted[i] > before && drafted[i] < batch && lens[i] >= 1 && lens[i] <= trees.stride, "tree ", i,
                " is of request ", drafted[i], " and has ", lens[i], " rows");
    before = drafted[i];
    total += lens[i] - 1;
    width = std::max(width, lens[i]);
  }
  before = -1;
  for (size_t i = 0; i < copied.size(); i++) {
    TORCH_CHECK(copied[i] > before && copied[i] < batch && copied_lens[i] >= 1, "copy ", i, " is of request ",
                copied[i], " and has ", copied_lens[i], " rows");
    TORCH_CHECK(std::find(drafted.begin(), drafted.end(), copied[i]) == drafted.end(), "request ", copied[i],
                " is drafted and copied");
    before = copied[i];
    total += copied_lens[i] - 1;
    width = std::max(width, copied_lens[i]);
  }
  at::Tensor parents = unfilled({total}, at::kInt), depths = unfilled({total}, at::kInt);
  at::Tensor ranks = unfilled({total}, at::kInt), requests = unfilled({total}, at::kLong);
  at::Tensor row_starts = unfilled({batch + 1}, at::kLong), counts = unfilled({batch}, at::kInt);
  int32_t *parent = parents.data_ptr<int32_t>(), *depth = depths.data_ptr<int32_t>();
  int32_t* rank = ranks.data_ptr<int32_t>();
  int32_t* of_request = counts.data_ptr<int32_t>();
  int64_t *request = requests.data_ptr<int64_t>(), *start = row_starts.data_ptr<int64_t>();
  std::vector<int64_t> row_lens(batch);
  int64_t row = 0, length = 1;
  size_t tree = 0, copy = 0;
  bool chains = true;
  for (int64_t b = 0; b < batch; b++) {
    start[b] = row;
    const bool own = tree < drafted.size() && drafted[tree] == b, copies = copy < copied.size() && copied[copy] == b;
    const int64_t count = row_lens[b] = own ? lens[tree] : copies ? copied_lens[copy] : 1;
    of_request[b] = int32_t(count);
    for (int64_t i = 0; i < count; i++, row++) {
      const int64_t from = int64_t(tree) * trees.stride + i;
      request[row] = b;
      parent[row] = own ? trees.parent[from] : int32_t(i) - 1;
      depth[row] = own ? trees.depth[from] : int32_t(i);
      rank[row] = own ? trees.rank[from] : i == 0 ? -1 : 0;
      chains &= depth[row] == i;
      length = std::max<int64_t>(length, depth[row] + 1);
    }
    tree += own;
    copy += copies;
  }
  start[batch] = row;
  at::Tensor masks;
  if (!chains) {
    masks = unfilled({batch, width, width}, at::kBool);
    std::fill_n(masks.data_ptr<bool>(), masks.numel(), false);
  }
  for (int64_t b = 0; !chains && b < batch; b++) {
    bool* mask = masks.data_ptr<bool>() + b * width * width;
    for (int64_t i = 0; i < row_lens[b]; i++) {
      const int64_t from = parent[start[b] + i];
      TORCH_CHECK(from < i, "row ", i, " of request ", b, " has the parent ", from);
      if (from >= 0) std::copy_n(mask + from * width, width, mask + i * width);
      mask[i * width + i] = true;
    }
  }
  return {parents, depths, ranks, requests, row_starts, counts, row_lens, masks, length, width};
}

constexpr int64_t kRowGroup = 4;   // ROW_GROUP of planning.py
constexpr double kRowShare = 0.3;  // ROW_SHARE of planning.py

// `rows_that_pay` of planning.py: rows of each of `count` trees, whose reaches fall.
std::vector<int64_t> rows_that_pay(const float* reaches, int64_t count, int64_t most, int64_t besides, double least) {
  std::vector<std::pair<float, int64_t>> rows;  // the likeliest first; ties: the first request
  rows.reserve(count * most);
  for (int64_t i = 0; i < count; i++)
    for (int64_t row = 1; row < most && reaches[i * most + row] > 0; row++) rows.push_back({-reaches[i * most + row], i});
  std::sort(rows.begin(), rows.end());
  const double row_price = least * kRowShare, first_price = row_price + least * kRowGroup * (1 - kRowShare);
  double surplus = 0, best = 0;
  size_t taken = 0;
  for (size_t row = 0; row < rows.size(); row++) {
    const bool starts_group = (besides + int64_t(row)) % kRowGroup == 0;
    surplus -= double(rows[row].first) + (starts_group ? first_price : row_price);
    if (!(surplus > best) && least != 0) continue;
    best = surplus;
    taken = row + 1;
  }
  std::vector<int64_t> lens(count, 1);
  for (size_t row = 0; row < taken; row++) lens[rows[row].second]++;
  return lens;
}

}  // namespace

at::Tensor platt(const at::Tensor& log_probs, const at::Tensor& shared, const at::Tensor& own, at::IntArrayRef places,
                 double max_logit) {
  const Parameters parameters(shared, own, places);
  require_log_probs(log_probs, parameters, places);
  at::Tensor chances = unfilled(log_probs.sizes(), at::kFloat);
  const int64_t depths = log_probs.size(1), ranks = log_probs.size(2);
  float* chance = chances.data_ptr<float>();
  for (int64_t b = 0; b < log_probs.size(0); b++) {
    Chances of_request(log_probs, b, parameters, places[b], max_logit);
    for (int64_t d = 0; d < depths; d++)
      for (int64_t j = 0; j < ranks; j++) *chance++ = of_request.at(d, j);
  }
  return chances;
}

Four best_first(const at::Tensor& chances, int64_t rows) {
  TORCH_CHECK(chances.scalar_type() == at::kFloat && chances.dim() == 3 && dense_on_cpu(chances) && rows >= 1,
              "chances are ", chances.scalar_type(), chances.sizes(), " and rows is ", rows,
              "; dense float32 of [B, D, k] and at least one row are needed");
  const int64_t batch = chances.size(0), depth_count = chances.size(1), rank_count = chances.size(2);
  at::Tensor parents = unfilled({batch, rows}, at::kInt), depths = unfilled({batch, rows}, at::kInt);
  at::Tensor ranks = unfilled({batch, rows}, at::kInt), reaches = unfilled({batch, rows}, at::kFloat);
  for (int64_t b = 0; b < batch; b++) {
    const float* own = chances.const_data_ptr<float>() + b * depth_count * rank_count;
    grow([&](int64_t d, int64_t j) { return own[d * rank_count + j]; }, depth_count, rank_count, rows,
         parents.data_ptr<int32_t>() + b * rows, depths.data_ptr<int32_t>() + b * rows,
         ranks.data_ptr<int32_t>() + b * rows, reaches.data_ptr<float>() + b * rows);
  }
  return {parents, depths, ranks, reaches};
}

Rows take_rows(const at::Tensor& parents, const at::Tensor& depths, const at::Tensor& ranks, at::IntArrayRef drafted,
               at::IntArrayRef lens, int64_t batch, at::IntArrayRef copied, at::IntArrayRef copied_lens) {
  const int64_t trees = int64_t(drafted.size());
  for (const at::Tensor* t : {&parents, &depths, &ranks})
    TORCH_CHECK(t->scalar_type() == at::kInt && t->dim() == 2 && dense_on_cpu(*t) && t->sizes() == parents.sizes() &&
                    t->size(0) == trees,
                "trees are ", t->scalar_type(), t->sizes(), "; dense int32 of [", trees, ", R] is needed");
  const TreeRows rows{parents.const_data_ptr<int32_t>(), depths.const_data_ptr<int32_t>(),
                      ranks.const_data_ptr<int32_t>(), parents.size(1)};
  return take(rows, drafted, lens, batch, copied, copied_lens);
}

// A draft's log-probabilities to the rows that are verified. It makes no more tensors than these: each takes time, and
// what the trees can teach goes into `blocks`.
Rows plan_rows(const at::Tensor& log_probs, const at::Tensor& shared, const at::Tensor& own, const at::Tensor& blocks,
               int64_t first_block, at::IntArrayRef places, double max_logit, double least, at::IntArrayRef drafted,
               int64_t batch, at::IntArrayRef copied, at::IntArrayRef copied_lens) {
  const Parameters parameters(shared, own, places);
  require_log_probs(log_probs, parameters, places);
  const int64_t most = most_rows_of(blocks, parameters.depths), count = log_probs.size(0);
  const int64_t depth_count = log_probs.size(1), rank_count = log_probs.size(2);
  TORCH_CHECK(int64_t(drafted.size()) == count, drafted.size(), " drafted requests with ", count, " log_probs");
  TORCH_CHECK(first_block >= 0 && first_block + count <= blocks.size(0), "blocks ", first_block, " to ",
              first_block + count, " of ", blocks.size(0));
  const float* log_prob = log_probs.const_data_ptr<float>();
  std::vector<Chances> chances;
  chances.reserve(count);
  std::vector<float> reaches(count * most);
  std::vector<int32_t> trees(3 * count * most);
  int32_t *parents = trees.data(), *depths = parents + count * most, *ranks = depths + count * most;
  int64_t besides = batch;
  for (const int64_t len : copied_lens) besides += len - 1;
  for (int64_t i = 0; i < count; i++) {
    float* reach = reaches.data() + i * most;
    Chances& own_chances = chances.emplace_back(log_probs, i, parameters, places[i], max_logit);
    grow([&](int64_t d, int64_t j) { return own_chances.at(d, j); }, depth_count, rank_count, most, parents + i * most,
         depths + i * most, ranks + i * most, reach);
  }
  const std::vector<int64_t> lens = rows_that_pay(reaches.data(), count, most, besides, least);
  Rows rows = take({parents, depths, ranks, most}, drafted, lens, batch, copied, copied_lens);
  const int64_t* start = std::get<4>(rows).const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; i++) {
    const Block block(blocks.data_ptr<float>() + (first_block + i) * blocks.size(1), most);
    block.at[Block::kRequest] = float(drafted[i]);
    block.at[Block::kStart] = float(start[drafted[i]]);
    block.at[Block::kLen] = float(lens[i]);
    block.at[Block::kFilled] = float(depth_count);
    for (int64_t row = 0; row < most; row++) {
      const int64_t from = i * most + row, d = depths[from] - 1, j = ranks[from];
      block.parent[row] = float(parents[from]);
      block.depth[row] = float(depths[from]);
      block.rank[row] = float(j);
      block.reach[row] = reaches[from];
      block.said[row] = j < 0 ? 0 : log_prob[(i * depth_count + d) * rank_count + j];
    }
    for (int64_t d = 0; d < depth_count; d++) block.first[d] = chances[i].at(d, 0);
  }
  return rows;
}

}  // namespace sglang_dflash
