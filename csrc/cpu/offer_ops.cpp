// Ops over what recent drafts offered: keeping it, and choosing whom to draft next.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common.h"

namespace sglang_dflash {
namespace {

// The tables of `Offers` in draft_offers.py: the latest `steps` offers of each of `count` requests.
struct Offers {
  Offers(const at::Tensor& reaches, const at::Tensor& depths, const at::Tensor& drafted, const at::Tensor& through,
         const at::Tensor& odds, const at::Tensor& kept, const at::Tensor& deep) {
    TORCH_CHECK(reaches.dim() == 3 && reaches.size(1) > 0 && depths.sizes() == reaches.sizes() && deep.dim() == 1,
                "reaches are ", reaches.sizes(), " and depths ", depths.sizes(), "; both must be [P, S, N]");
    for (const at::Tensor* t : {&drafted, &through, &odds})
      TORCH_CHECK(t->dim() == 2 && t->size(0) == reaches.size(0) && t->size(1) == reaches.size(1), "a table is ",
                  t->sizes(), " beside reaches of ", reaches.sizes());
    TORCH_CHECK(kept.dim() == 1 && kept.size(0) == reaches.size(0), "kept is ", kept.sizes(), " for ", reaches.size(0),
                " places");
    for (const at::Tensor* t : {&reaches, &depths, &drafted, &through, &odds, &kept, &deep})
      TORCH_CHECK(t->is_contiguous(), "tables must be contiguous");
    count = reaches.size(0);
    steps = reaches.size(1);
    rows = reaches.size(2);
    most = deep.size(0);
    this->reaches = reaches.data_ptr<float>();
    this->depths = depths.data_ptr<int32_t>();
    this->drafted = drafted.data_ptr<int64_t>();
    this->through = through.data_ptr<float>();
    this->odds = odds.data_ptr<float>();
    this->kept = kept.data_ptr<int64_t>();
    this->deep = deep.data_ptr<float>();
  }

  void require(int64_t place, int64_t least) const {
    TORCH_CHECK(place >= least && place < count, "a place is ", place, "; allowed: ", least, " .. ", count - 1);
  }

  // Calls each(depth, reach) for the rows of an offer. Beyond what was drafted, it goes on as a chain of mean chances,
  // with its own factor of their odds.
  template <typename Each>
  void for_rows(int64_t offer, Each&& each) const {
    for (int64_t row = offer * rows; row < (offer + 1) * rows; row++) each(depths[row], double(reaches[row]));
    double reach = through[offer];
    for (int64_t depth = drafted[offer]; depth < most; depth++) {
      const double raised = double(odds[offer]) * deep[depth];
      reach *= raised / (raised + 1 - deep[depth]);
      each(depth + 1, reach);
    }
  }

  int64_t count, steps, rows, most;
  float *reaches, *through, *odds, *deep;
  int32_t* depths;
  int64_t *drafted, *kept;
};

// kLeastChance as in draft_offers.py.
constexpr double kLeastChance = 1e-3;

double log_odds(double chance) {
  const double clamped = std::clamp(chance, kLeastChance, 1 - kLeastChance);
  return std::log(clamped / (1 - clamped));
}

void keep_step(const Offers& offers, at::IntArrayRef places, const at::Tensor& chances, const at::Tensor& tree_reaches,
               const at::Tensor& tree_depths, double deep_weight, double own_share) {
  const int64_t batch = places.size();
  TORCH_CHECK(chances.scalar_type() == at::kFloat && chances.dim() == 3 && chances.is_contiguous() &&
                  chances.size(0) == batch && chances.size(1) <= offers.most && chances.size(2) > 0,
              "chances are ", chances.scalar_type(), chances.sizes(), "; dense float32 of [", batch, ", up to ",
              offers.most, ", k] is needed");
  for (const at::Tensor* t : {&tree_reaches, &tree_depths})
    TORCH_CHECK(t->dim() == 2 && t->is_contiguous() && t->size(0) == batch && t->size(1) == offers.rows + 1,
                "trees are ", t->sizes(), "; [", batch, ", ", offers.rows + 1, "] is needed");
  for (const int64_t place : places) offers.require(place, 0);
  const int64_t filled = chances.size(1), candidates = chances.size(2);
  const float *chance = chances.const_data_ptr<float>(), *reach = tree_reaches.const_data_ptr<float>();
  const int32_t* depth = tree_depths.const_data_ptr<int32_t>();
  double mean_log_odds = 0;  // sum over the drafted depths
  for (int64_t d = 0; batch > 0 && d < filled; d++) {
    double sum = 0;
    for (int64_t b = 0; b < batch; b++) sum += chance[(b * filled + d) * candidates];
    offers.deep[d] += deep_weight * (sum / batch - offers.deep[d]);
    mean_log_odds += log_odds(offers.deep[d]);
  }
  for (int64_t b = 0; b < batch; b++) {
    const int64_t offer = places[b] * offers.steps + offers.kept[places[b]]++ % offers.steps;
    std::copy_n(reach + b * (offers.rows + 1) + 1, offers.rows, offers.reaches + offer * offers.rows);
    std::copy_n(depth + b * (offers.rows + 1) + 1, offers.rows, offers.depths + offer * offers.rows);
    double through_all = 1, own_log_odds = 0;
    for (int64_t d = 0; d < filled; d++) {
      const double first = chance[(b * filled + d) * candidates];
      through_all *= first;
      own_log_odds += log_odds(first);
    }
    offers.through[offer] = through_all;
    offers.odds[offer] = std::exp(own_share * (own_log_odds - mean_log_odds) / filled);
    offers.drafted[offer] = filled;
  }
}

// `places` holds those of all steps one after the other. Steps before a wrong one are kept.
void keep_offers(at::Tensor& reaches, at::Tensor& depths, at::Tensor& drafted, at::Tensor& through, at::Tensor& odds,
                 at::Tensor& kept, at::Tensor& deep, at::IntArrayRef places, at::TensorList chances,
                 at::TensorList tree_reaches, at::TensorList tree_depths, double deep_weight, double own_share) {
  const Offers offers(reaches, depths, drafted, through, odds, kept, deep);
  for (const at::TensorList* list : {&tree_reaches, &tree_depths})
    TORCH_CHECK(list->size() == chances.size(), "a list has ", list->size(), " of ", chances.size(), " steps");
  const auto steps = places_of_steps(places, chances, "chances");
  for (size_t i = 0; i < steps.size(); i++)
    keep_step(offers, steps[i], chances[i], tree_reaches[i], tree_depths[i], deep_weight, own_share);
}

// Expected tokens and rows of one request's block, by depth.
struct Promise {
  explicit Promise(int64_t depths) : tokens(depths + 1), rows(depths + 1) {}

  void add(const Offers& offers, int64_t offer, double weight, double least) {
    offers.for_rows(offer, [&](int64_t depth, double reach) {
      if (!(reach > least)) return;
      tokens[depth] += reach * weight;
      rows[depth] += weight;
    });
    total += weight;
  }

  std::vector<double> tokens, rows;
  double total = 0;
};

// costs: as in `StepCosts`.
std::tuple<int64_t, std::vector<int64_t>, double, double> best_width(
    const at::Tensor& reaches, const at::Tensor& depths, const at::Tensor& drafted, const at::Tensor& through,
    const at::Tensor& odds, const at::Tensor& kept, const at::Tensor& deep, at::IntArrayRef places,
    at::IntArrayRef others, double prior_steps, at::ArrayRef<double> costs, double price) {
  const Offers offers(reaches, depths, drafted, through, odds, kept, deep);
  TORCH_CHECK(costs.size() == 5, costs.size(), " costs; 5 are needed");
  const double gap_s = costs[0], draft_fixed_s = costs[1], draft_row_s = costs[2], rest_fixed_s = costs[3];
  const double rest_row_s = costs[4], least = price * rest_row_s;
  Promise of_others(offers.most);
  for (const int64_t place : others) {
    offers.require(place, 0);
    const int64_t latest = (offers.kept[place] + offers.steps - 1) % offers.steps;
    of_others.add(offers, place * offers.steps + latest, prior_steps / others.size(), least);
  }
  std::vector<Promise> promises(places.size(), of_others);
  for (size_t b = 0; b < places.size(); b++) {
    offers.require(places[b], -1);
    const int64_t own = places[b] < 0 ? 0 : std::min(offers.kept[places[b]], offers.steps);
    for (int64_t step = 0; step < own; step++) promises[b].add(offers, places[b] * offers.steps + step, 1, least);
    for (int64_t d = 1; d <= offers.most; d++) {  // sums over the depths of each width
      promises[b].tokens[d] += promises[b].tokens[d - 1];
      promises[b].rows[d] += promises[b].rows[d - 1];
    }
  }
  const double plain_s = gap_s + rest_fixed_s + rest_row_s * places.size();
  std::tuple<int64_t, std::vector<int64_t>, double, double> best{1, {}, double(places.size()), plain_s};
  double best_rate = 0;
  std::vector<int64_t> requests;
  for (int64_t width = 2; width <= offers.most + 1; width++) {
    requests.clear();
    double tokens = places.size(), seconds = plain_s + draft_fixed_s;
    for (size_t b = 0; b < promises.size(); b++) {
      const Promise& promise = promises[b];
      if (promise.total == 0) continue;
      const double brought = promise.tokens[width - 1] / promise.total;
      const double cost_s = rest_row_s * promise.rows[width - 1] / promise.total + draft_row_s * width;
      if (!(brought > price * cost_s)) continue;
      requests.push_back(b);
      tokens += brought;
      seconds += cost_s;
    }
    if (requests.empty() || !(tokens / seconds > best_rate)) continue;
    best_rate = tokens / seconds;
    best = {width, requests, tokens, seconds};
  }
  return best;
}

}  // namespace

TORCH_LIBRARY_IMPL(sglang_dflash, CPU, m) {
  m.impl("keep_offers", keep_offers);
  m.impl("best_width", best_width);
}

}  // namespace sglang_dflash
