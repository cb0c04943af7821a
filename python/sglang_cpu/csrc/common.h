// Shared by all CPU ops: views of tensors, argument checks, the chosen kernels, loops over threads.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace sglang_cpu {

const Kernels& kernels();

inline Type type_of(const at::Tensor& t, const char* name) {
  TORCH_CHECK((t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16) && t.device().is_cpu(), name, " is ",
              t.scalar_type(), " of ", t.device(), "; allowed: float32, bfloat16 of the CPU");
  return t.scalar_type() == at::kFloat ? Type::kFloat : Type::kBFloat16;
}

// A new, uninitialised tensor. It goes around torch's dispatcher, whose code would have to come into the processor's
// caches in every step, because the models' weights have filled them.
inline at::Tensor unfilled(at::IntArrayRef sizes, at::ScalarType type) { return at::detail::empty_cpu(sizes, type); }

// Whether the last dimension is dense. If it has a single element, torch may keep any stride.
inline bool dense(const at::Tensor& t) { return t.size(-1) <= 1 || t.stride(-1) == 1; }

// View of a tensor [outer, inner, last] or [outer, last] with a dense last dimension.
inline View view_of(const at::Tensor& t, const char* name) {
  TORCH_CHECK(t.dim() == 2 || t.dim() == 3, name, " has shape ", t.sizes(), "; 2 or 3 dimensions are needed");
  TORCH_CHECK(dense(t), name, " has strides ", t.strides(), "; the last must be 1");
  return {t.data_ptr(), type_of(t, name), t.stride(0), t.dim() == 3 ? t.stride(1) : 0};
}

inline const int64_t* ids_of(const at::Tensor& t, const char* name, int64_t size) {
  TORCH_CHECK(t.scalar_type() == at::kLong && t.dim() == 1 && t.is_contiguous() && t.numel() == size, name, " is ",
              t.scalar_type(), t.sizes(), "; dense int64 of [", size, "] is needed");
  return t.const_data_ptr<int64_t>();
}

inline void require_table(const at::Tensor& req_to_token) {
  TORCH_CHECK(req_to_token.scalar_type() == at::kInt && req_to_token.dim() == 2 && dense(req_to_token) &&
                  req_to_token.device().is_cpu(),
              "req_to_token is ", req_to_token.scalar_type(), req_to_token.sizes(), " of ", req_to_token.device(),
              "; int32 of [R, C] of the CPU is needed");
}

inline void require_below(const int64_t* ids, int64_t count, int64_t limit, const char* name) {
  for (int64_t i = 0; i < count; i++)
    TORCH_CHECK(ids[i] >= 0 && ids[i] < limit, name, "[", i, "] is ", ids[i], "; allowed: 0 .. ", limit - 1);
}

// Copies a row of `heads` vectors with `dim` elements of `element` bytes: at once if the heads are adjacent in both.
inline void copy_heads(const View& from, const View& to, int64_t from_row, int64_t to_row, int64_t heads, int64_t dim,
                       int64_t element) {
  const char* source = static_cast<const char*>(from.data) + from_row * from.outer * element;
  char* target = static_cast<char*>(to.data) + to_row * to.outer * element;
  const bool whole = from.inner == dim && to.inner == dim;
  const int64_t runs = whole ? 1 : heads, bytes = (whole ? heads : 1) * dim * element;
  for (int64_t run = 0; run < runs; run++)
    memcpy(target + run * to.inner * element, source + run * from.inner * element, bytes);
}

// Calls `body(item, thread)` for items 0 .. count - 1. Each thread first takes the items of its own range in order, so
// that what it prefetches beyond an item is what it reads next. Then it takes items from the other threads' ranges.
template <typename Body>
void each_item(int64_t count, Body body) {
  const int64_t threads = std::min<int64_t>(count, at::in_parallel_region() ? 1 : at::get_num_threads());
  if (threads <= 1) {
    for (int64_t item = 0; item < count; item++) body(item, 0);
    return;
  }
  struct alignas(64) Range {  // one cache line each
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  std::vector<Range> ranges(threads);
  for (int64_t thread = 0; thread < threads; thread++) {
    ranges[thread].next = count * thread / threads;
    ranges[thread].end = count * (thread + 1) / threads;
  }
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; thread++)
      for (int64_t other = 0; other < threads; other++) {
        Range& range = ranges[(thread + other) % threads];
        while (range.next.load(std::memory_order_relaxed) < range.end) {
          const int64_t item = range.next.fetch_add(1, std::memory_order_relaxed);
          if (item < range.end) body(item, thread);
        }
      }
  });
}

}  // namespace sglang_cpu
