// The op that takes in what drafted steps have shown. It is one op, because the code of each op has to come into the
// processor's caches, which the models' weights have filled.
#include <vector>

#include "host_ops.h"
#include "plan_tables.h"

namespace sglang_dflash {
namespace {

// The numbers of PlattTuning in platt_scaling.py in their order, then deep_weight and own_share of planning.py.
struct Tuning {
  explicit Tuning(at::ArrayRef<double> values) : of(values) {
    TORCH_CHECK(of.size() == 10, of.size(), " tuning values; 10 are needed");
  }

  enum Kind { kSlope, kDepth, kRequest };
  double prior(Kind kind) const { return of[2 * kind]; }
  double trials(Kind kind) const { return of[2 * kind + 1]; }
  double damping() const { return of[6]; }
  double max_logit() const { return of[7]; }
  double deep_weight() const { return of[8]; }
  double own_share() const { return of[9]; }

  at::ArrayRef<double> of;
};

constexpr int64_t kCounts = 3;  // of rows of one depth: how many, how many were promised and accepted
constexpr double kLeastSlope = 0.1, kMostSlope = 4.0;  // SLOPES of platt_scaling.py
constexpr double kLeastInformation = 1e-4;             // LEAST_INFORMATION of planning.py

// Sums over the verified rows: how many, the depths of their trees' deepest, how many were promised and accepted.
struct Sums {
  int64_t rows = 0, depth = 0, accepted = 0;
  double promised = 0;
};

void move(double* parameter, double gradient, double information, Tuning::Kind kind, const Tuning& tuning) {
  parameter[1] += information - parameter[1] / tuning.trials(kind);
  const double value = parameter[0] + tuning.damping() * gradient / (parameter[1] + tuning.prior(kind));
  parameter[0] = std::min(std::max(value, -tuning.max_logit()), tuning.max_logit());
}

// One verified row whose parent was accepted.
void observe(const Parameters& parameters, int64_t place, int64_t depth, int64_t rank, float said, bool accepted,
             const Tuning& tuning) {
  if (!(said > -INFINITY)) return;  // or NaN: nothing was said
  double* slope = parameters.shared + 2 * Parameters::kSlope;
  double* others = parameters.shared + 2 * Parameters::kOthers;
  double* of_depth = parameters.shared + 2 * (Parameters::kDepths + depth - 1);
  double* request = parameters.own + 2 * place;
  const double x = logit(said, tuning.max_logit());
  const double chance = sigmoid(slope[0] * x + of_depth[0] + request[0] + (rank > 0 ? others[0] : 0));
  const double surplus = accepted - chance, information = chance * (1 - chance) + kLeastInformation;
  move(slope, surplus * x, information * x * x, Tuning::kSlope, tuning);
  slope[0] = std::clamp(slope[0], kLeastSlope, kMostSlope);
  move(of_depth, surplus, information, Tuning::kDepth, tuning);
  move(request, surplus, information, Tuning::kRequest, tuning);
  if (rank > 0) move(others, surplus, information, Tuning::kDepth, tuning);
}

void learn_rows(const Block& block, int64_t place, const at::Tensor& path, const Parameters& parameters,
                double* by_depth, double* own_by_depth, const Tuning& tuning, Sums& sums) {
  const int64_t rows = block.get(Block::kLen), length = path.size(1);
  const int64_t* step = path.const_data_ptr<int64_t>() + block.get(Block::kRequest) * length;
  std::vector<bool> accepted(rows, false);
  for (int64_t j = 0; j < length; j++) {
    accepted[step[j] - block.get(Block::kStart)] = true;
  }
  int64_t deepest = 0;
  for (int64_t row = 1; row < rows; row++) {
    const int64_t depth = int64_t(block.depth[row]), rank = int64_t(block.rank[row]);
    for (double* counts : {by_depth, own_by_depth + kCounts * place * parameters.depths}) {
      counts += kCounts * (depth - 1);
      counts[0]++;
      counts[1] += block.reach[row];
      counts[2] += accepted[row];
    }
    sums.promised += block.reach[row];
    sums.accepted += accepted[row];
    deepest = std::max(deepest, depth);
    if (accepted[int64_t(block.parent[row])])
      observe(parameters, place, depth, rank, block.said[row], accepted[row], tuning);
  }
  sums.rows += rows - 1;
  sums.depth += deepest;
}

// LEAST_CHANCE of planning.py.
constexpr double kLeastChance = 1e-3;

double log_odds(double chance) {
  const double clamped = std::clamp(chance, kLeastChance, 1 - kLeastChance);
  return std::log(clamped / (1 - clamped));
}

// What one step offered; all its blocks have the same depth.
void keep_offers(at::ArrayRef<Block> blocks, at::IntArrayRef places, const Offers& offers, const Tuning& tuning) {
  const int64_t filled = blocks[0].get(Block::kFilled);
  double mean_log_odds = 0;  // sum over the drafted depths
  for (int64_t d = 0; d < filled; d++) {
    double sum = 0;
    for (const Block& block : blocks) sum += block.first[d];
    offers.deep[d] += tuning.deep_weight() * (sum / blocks.size() - offers.deep[d]);
    mean_log_odds += log_odds(offers.deep[d]);
  }
  for (size_t i = 0; i < blocks.size(); i++) {
    const Block& block = blocks[i];
    const int64_t offer = places[i] * offers.steps + offers.kept[places[i]]++ % offers.steps;
    std::copy_n(block.reach + 1, offers.rows, offers.reaches + offer * offers.rows);
    std::copy_n(block.depth + 1, offers.rows, offers.depths + offer * offers.rows);
    double through_all = 1, own_log_odds = 0;
    for (int64_t d = 0; d < filled; d++) {
      through_all *= block.first[d];
      own_log_odds += log_odds(block.first[d]);
    }
    offers.through[offer] = through_all;
    offers.odds[offer] = std::exp(tuning.own_share() * (own_log_odds - mean_log_odds) / filled);
    offers.drafted[offer] = filled;
  }
}

void require_counts(const at::Tensor& table, const char* name, at::IntArrayRef sizes) {
  TORCH_CHECK(table.scalar_type() == at::kDouble && dense_on_cpu(table) && table.sizes() == sizes, name, " is ",
              table.scalar_type(), table.sizes(), "; dense float64 of ", sizes, " is needed");
}

// `plan_rows` wrote the blocks. If they were changed since, no index may leave a table.
void require(const Block& block, int64_t most_rows, int64_t most_depths, const at::Tensor& path) {
  const int64_t rows = block.get(Block::kLen), filled = block.get(Block::kFilled);
  const int64_t request = block.get(Block::kRequest);
  TORCH_CHECK(rows >= 1 && rows <= most_rows && filled >= 1 && filled <= most_depths, "a block has ", rows, " of ",
              most_rows, " rows and ", filled, " of ", most_depths, " depths");
  TORCH_CHECK(path.scalar_type() == at::kLong && path.dim() == 2 && dense_on_cpu(path) && request >= 0 &&
                  request < path.size(0),
              "path is ", path.scalar_type(), path.sizes(), "; dense int64 of [B, L] is needed for request ", request);
  const int64_t* step = path.const_data_ptr<int64_t>() + request * path.size(1);
  for (int64_t j = 0; j < path.size(1); j++) {
    const int64_t row = step[j] - block.get(Block::kStart);
    TORCH_CHECK(row >= 0 && row < rows, "a path holds row ", row, " of ", rows);
  }
  for (int64_t row = 1; row < rows; row++)
    TORCH_CHECK(block.parent[row] >= 0 && block.parent[row] < row && block.depth[row] >= 1 &&
                    block.depth[row] <= filled,
                "row ", row, " of a block has parent ", block.parent[row], " and depth ", block.depth[row]);
}

}  // namespace

// `places` holds the requests of all steps one after the other, `counts` how many each has; `fresh` is `new` of the
// specification. If anything is wrong, nothing is learned.
std::tuple<int64_t, int64_t, double, int64_t> learn_steps(
    const at::Tensor& shared, const at::Tensor& own, const Tensors& offer_tables, const at::Tensor& by_depth,
    const at::Tensor& own_by_depth, const at::Tensor& blocks, at::IntArrayRef places, at::IntArrayRef counts,
    const Tensors& paths, const std::vector<double>& values, at::IntArrayRef fresh) {
  const Tuning tuning(values);
  const Offers offers(offer_tables);
  const Parameters parameters(shared, own, places);
  const int64_t most = most_rows_of(blocks, parameters.depths);
  require_counts(by_depth, "by_depth", {parameters.depths, kCounts});
  TORCH_CHECK(parameters.count == offers.count && parameters.depths == offers.most && most == offers.rows + 1,
              "parameters and blocks are of ", parameters.count, " requests, ", parameters.depths, " depths and ",
              most, " rows, offers of ", offers.count, ", ", offers.most, " and ", offers.rows + 1);
  require_counts(own_by_depth, "own_by_depth", {parameters.count, parameters.depths, kCounts});
  TORCH_CHECK(paths.size() == counts.size(), paths.size(), " paths of ", counts.size(), " steps");
  int64_t all = 0;
  for (const int64_t count : counts) {
    TORCH_CHECK(count >= 1, "a step has ", count, " blocks");
    all += count;
  }
  TORCH_CHECK(all == int64_t(places.size()) && all <= blocks.size(0), "the steps have ", all, " blocks of ",
              blocks.size(0), ", but there are ", places.size(), " places");
  for (const int64_t place : places) offers.require(place, 0);
  for (const int64_t place : fresh) offers.require(place, 0);
  std::vector<Block> rows;
  for (int64_t block = 0; block < all; block++)
    rows.emplace_back(blocks.data_ptr<float>() + block * blocks.size(1), most);
  for (int64_t i = 0, block = 0; i < int64_t(counts.size()); i++)
    for (int64_t b = 0; b < counts[i]; b++) require(rows[block++], most, parameters.depths, paths[i]);
  double* own_counts = own_by_depth.data_ptr<double>();
  for (const int64_t place : fresh) {
    std::fill_n(parameters.own + 2 * place, 2, 0.0);
    offers.kept[place] = 0;
    std::fill_n(own_counts + kCounts * place * parameters.depths, kCounts * parameters.depths, 0.0);
  }
  Sums sums;
  for (int64_t i = 0, first = 0; i < int64_t(counts.size()); first += counts[i++]) {
    const at::ArrayRef<Block> own_rows = at::ArrayRef<Block>(rows).slice(first, counts[i]);
    const at::IntArrayRef own_places = places.slice(first, counts[i]);
    for (int64_t b = 0; b < counts[i]; b++)
      learn_rows(own_rows[b], own_places[b], paths[i], parameters, by_depth.data_ptr<double>(), own_counts, tuning,
                 sums);
    keep_offers(own_rows, own_places, offers, tuning);
  }
  return {sums.rows, sums.depth, sums.promised, sums.accepted};
}

}  // namespace sglang_dflash
