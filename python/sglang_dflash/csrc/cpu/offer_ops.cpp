// The op that chooses whom to draft next, by what recent drafts offered.
#include <vector>

#include "host_ops.h"
#include "plan_tables.h"

namespace sglang_dflash {
namespace {

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

}  // namespace

// costs: as in `StepCosts`.
std::tuple<int64_t, std::vector<int64_t>, double, double> best_width(
    const Tensors& offer_tables, at::IntArrayRef places, at::IntArrayRef others, double prior_steps,
    const std::vector<double>& costs, double price) {
  const Offers offers(offer_tables);
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

}  // namespace sglang_dflash
