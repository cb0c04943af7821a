// The tables of a plan, which its ops read and learning changes. Specified in ops/planning.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "common.h"

namespace sglang_dflash {

// The parameters of Platt scaling, each a row of (value, information): of all requests, then of single ones.
struct Parameters {
  enum Shared { kSlope, kOthers, kDepths };

  Parameters(const at::Tensor& shared, const at::Tensor& own, at::IntArrayRef places) {
    for (const at::Tensor* t : {&shared, &own})
      TORCH_CHECK(t->scalar_type() == at::kDouble && t->dim() == 2 && dense_on_cpu(*t) && t->size(1) == 2,
                  "parameters are ", t->scalar_type(), t->sizes(), "; dense float64 of [P, 2] is needed");
    depths = shared.size(0) - kDepths;
    count = own.size(0);
    for (const int64_t place : places)
      TORCH_CHECK(place >= -1 && place < count, "a place is ", place, "; allowed: -1 .. ", count - 1);
    this->shared = shared.data_ptr<double>();
    this->own = own.data_ptr<double>();
  }

  double value(int64_t parameter) const { return shared[2 * parameter]; }
  double value_of(int64_t place) const { return place < 0 ? 0 : own[2 * place]; }

  double *shared, *own;
  int64_t depths, count;
};

constexpr double kSurest = 4.0;  // SUREST of platt_scaling.py

// log(p / (1 - p)), from -max_logit to kSurest.
inline double logit(double log_prob, double max_logit) {
  const double bounded = std::min(std::max(log_prob, -max_logit), -1e-6);
  return std::min(std::max(bounded - std::log1p(-std::exp(bounded)), -max_logit), kSurest);
}

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// One drafted request of a step, in a row of the table `blocks`: the columns are those of `Block` in planning.py. Small
// whole numbers are exact in float32.
struct Block {
  enum Column { kRequest, kStart, kLen, kFilled, kRows };

  Block(float* at, int64_t most_rows)
      : at(at), parent(at + kRows), depth(parent + most_rows), rank(depth + most_rows), reach(rank + most_rows),
        said(reach + most_rows), first(said + most_rows) {}

  static int64_t columns(int64_t most_rows, int64_t depths) { return kRows + 5 * most_rows + depths; }
  int64_t get(Column column) const { return int64_t(at[column]); }

  float *at, *parent, *depth, *rank, *reach, *said, *first;
};

// Most rows of a block in the table; `depths` is how many first candidates it holds.
inline int64_t most_rows_of(const at::Tensor& blocks, int64_t depths) {
  TORCH_CHECK(blocks.scalar_type() == at::kFloat && blocks.dim() == 2 && dense_on_cpu(blocks), "blocks are ",
              blocks.scalar_type(), blocks.sizes(), "; dense float32 of [N, F] is needed");
  const int64_t most = (blocks.size(1) - Block::columns(0, depths)) / 5;
  TORCH_CHECK(most >= 1 && blocks.size(1) == Block::columns(most, depths), "blocks have ", blocks.size(1),
              " columns, which hold no rows beside ", depths, " depths");
  return most;
}

// The tables of `Offers` in draft_offers.py: the latest `steps` offers of each of `count` requests.
struct Offers {
  explicit Offers(const std::vector<at::Tensor>& tables) {
    TORCH_CHECK(tables.size() == 7, tables.size(), " tables of offers; 7 are needed");
    const at::Tensor &reaches = tables[0], &depths = tables[1], &drafted = tables[2], &through = tables[3];
    const at::Tensor &odds = tables[4], &kept = tables[5], &deep = tables[6];
    TORCH_CHECK(reaches.dim() == 3 && reaches.size(1) > 0 && depths.sizes() == reaches.sizes() && deep.dim() == 1,
                "reaches are ", reaches.sizes(), " and depths ", depths.sizes(), "; both must be [P, S, N]");
    for (const at::Tensor* t : {&drafted, &through, &odds})
      TORCH_CHECK(t->dim() == 2 && t->size(0) == reaches.size(0) && t->size(1) == reaches.size(1), "a table is ",
                  t->sizes(), " beside reaches of ", reaches.sizes());
    TORCH_CHECK(kept.dim() == 1 && kept.size(0) == reaches.size(0), "kept is ", kept.sizes(), " for ", reaches.size(0),
                " places");
    for (const at::Tensor* t : {&reaches, &depths, &drafted, &through, &odds, &kept, &deep})
      TORCH_CHECK(dense_on_cpu(*t), "tables must be contiguous");
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

}  // namespace sglang_dflash
