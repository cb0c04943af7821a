// How threads share rows, and rows of logits in particular.
#pragma once

#include <vector>

#include "common.h"

namespace sglang_cpu {

constexpr int64_t kGrain = 16384;  // elements below which another thread costs more than it saves

inline int64_t grain(int64_t row_size) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, row_size)); }

// Index of a row's largest logit; the threads share the vocabulary.
inline int64_t argmax_of(const char* row, Type type, int64_t size, int64_t element) {
  constexpr int64_t kSpan = 16384;
  const int64_t spans = (size + kSpan - 1) / kSpan;
  std::vector<Best> best(spans);
  at::parallel_for(0, spans, 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      best[i] = kernels().argmax(row + i * kSpan * element, type, std::min(kSpan, size - i * kSpan));
  });
  int64_t first = 0;
  for (int64_t i = 1; i < spans; i++) {
    const bool nan = best[first].value != best[first].value, other_nan = best[i].value != best[i].value;
    if (!nan && (other_nan || best[i].value > best[first].value)) first = i;
  }
  return first * kSpan + best[first].index;
}

// Calls `body(item)` for items 0 .. count - 1, which are rows of logits or requests. With fewer items than threads, the
// items run one after the other and the threads share each row. Otherwise the threads share the items: torch does not
// nest parallel regions.
template <typename Body>
void each_of_logits(int64_t count, int64_t vocabulary, Body body) {
  const int64_t together = count >= at::get_num_threads() ? 1 : count;
  at::parallel_for(0, count, std::max<int64_t>(together, grain(vocabulary)), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++) body(item);
  });
}

}  // namespace sglang_cpu
