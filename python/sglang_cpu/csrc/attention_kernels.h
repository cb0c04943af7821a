// Attention of a few query vectors over paged keys and values, for one instruction set.
//
// A row's keys are processed in chunks that start at multiples of kChunkKeys (flash decoding). A chunk gives scores,
// their maximum, exponentials, their sum and weighted values; then the chunks are added up in order. None of this
// depends on the other rows, on the other requests or on the thread of a chunk, so neither do a row's bits.
#pragma once

#include "vec.h"

namespace sglang_cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kScoreRows = 4;  // rows that, with four keys, fill the registers
#else
constexpr int kScoreRows = 2;
#endif
constexpr int64_t kScoreKeys = 4;
constexpr int64_t kInPlaceRows = 4;  // more rows read values from a dense copy: slots pages apart share few cache sets

static_assert(kChunkKeys % kMostLanes == 0 && kChunkKeys % kScoreKeys == 0, "vectors and groups of keys fill a chunk");

// A thread's memory, in floats. Every part starts at a multiple of kMostLanes floats.
struct Workspace {
  int64_t rows, dim, v_dim;  // of the largest tile; dim and v_dim padded to vectors
  float *q, *scores, *values, *total, *maxima, *sums, *total_maxima, *total_sums, *keys, *block;
  int64_t size;

  Workspace(const Attention& a, float* base)
      : rows(larger(kTileRows, a.groups)), dim(padded(a.dim)), v_dim(padded(a.v_dim)) {
    size = 0;
    auto take = [&](float*& part, int64_t count) {
      part = base ? base + size : nullptr;
      size += padded(count);
    };
    take(q, rows * dim);
    take(scores, rows * kChunkKeys);
    take(values, rows * v_dim);
    take(total, rows * v_dim);
    take(maxima, rows);
    take(sums, rows);
    take(total_maxima, rows);
    take(total_sums, rows);
    take(keys, kScoreKeys * dim);
    take(block, kBlockKeys * v_dim);
  }
};

// The keys that a row sees: begin .. end - 1.
struct Sight {
  int64_t begin, end;
};

INLINE Sight sight(const Attention& a, const AttentionItem& item, int64_t row) {
  const int64_t prefix = a.prefix_lens[item.request];
  const int64_t count = a.row_starts[item.request + 1] - a.row_starts[item.request];
  const int64_t position = prefix + row;
  return {a.window_left < 0 ? 0 : larger(0, position - a.window_left), a.causal ? position + 1 : prefix + count};
}

// Prefetches into the L2 cache: in L1, slots that lie whole pages apart would evict each other.
INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

template <typename T>
INLINE const T* at(const View& view, int64_t outer, int64_t inner) {
  return static_cast<const T*>(view.data) + outer * view.outer + inner * view.inner;
}

template <typename T>
INLINE void widen(const T* from, float* to, int64_t count, int64_t padded) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < padded) store(to + i, load_some(from + i, count - i));
  for (i += kLanes; i < padded; i++) to[i] = 0;
}

template <typename T>
void load_queries(const Attention& a, const AttentionItem& item, const Workspace& w) {
  const int64_t first = a.row_starts[item.request] + item.first_row;
  for (int64_t r = 0; r < item.rows * a.groups; r++) {
    const T* q = at<T>(a.q, first + r / a.groups, item.kv_head * a.groups + r % a.groups);
    float* to = w.q + r * w.dim;
    for (int64_t d = 0; d < a.dim; d++) to[d] = wide(q[d]) * a.scaling;
    for (int64_t d = a.dim; d < w.dim; d++) to[d] = 0;
  }
}

// Scores of `Rows` query vectors with four keys. A sum runs over the head's vectors first, then over the lanes.
template <int Rows>
INLINE void score(const float* q, int64_t q_stride, const float* const* keys, int64_t dim, float* scores) {
  Vec acc[Rows][kScoreKeys] = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    Vec k[kScoreKeys];
    for (int j = 0; j < kScoreKeys; j++) k[j] = load(keys[j] + d);
    for (int r = 0; r < Rows; r++) {
      const Vec x = load(q + r * q_stride + d);
      for (int j = 0; j < kScoreKeys; j++) acc[r][j] += x * k[j];
    }
  }
  if (d < dim) {
    Vec k[kScoreKeys];
    for (int j = 0; j < kScoreKeys; j++) k[j] = load_some(keys[j] + d, dim - d);
    for (int r = 0; r < Rows; r++) {
      const Vec x = load(q + r * q_stride + d);
      for (int j = 0; j < kScoreKeys; j++) acc[r][j] += x * k[j];
    }
  }
  for (int r = 0; r < Rows; r++) {
    const Vec4 s = sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    memcpy(scores + r * kChunkKeys, &s, sizeof s);
  }
}

template <int Rows = kScoreRows>
INLINE void score_rows(const Workspace& w, int64_t rows, const float* const* keys, int64_t dim, float* scores) {
  int64_t r = 0;
  for (; r + Rows <= rows; r += Rows) score<Rows>(w.q + r * w.dim, w.dim, keys, dim, scores + r * kChunkKeys);
  for (; r < rows; r++) score<1>(w.q + r * w.dim, w.dim, keys, dim, scores + r * kChunkKeys);
}

// Scores of all rows with keys begin .. end - 1 of a chunk. Up to three scores after them are overwritten, too.
template <typename T>
void score_chunk(const Attention& a, const Workspace& w, const int32_t* slots, int64_t rows, int64_t kv_head,
                 int64_t begin, int64_t end) {
  for (int64_t key = begin; key < end; key += kScoreKeys) {
    const float* keys[kScoreKeys];
    for (int64_t j = 0; j < kScoreKeys; j++) {
      const T* k = at<T>(a.k, slots[smaller(key + j, end - 1)], kv_head);
      const T* ahead = at<T>(a.k, slots[smaller(key + j + 2 * kScoreKeys, end - 1)], kv_head);
      for (int64_t d = 0; d < a.dim; d += 64 / int64_t(sizeof(T))) prefetch(ahead + d);
      if constexpr (sizeof(T) == sizeof(float)) {
        keys[j] = k;
      } else {
        keys[j] = w.keys + j * w.dim;
        widen(k, w.keys + j * w.dim, a.dim, w.dim);
      }
    }
    // A converted key is padded to whole vectors with zeros. A key that is read in place is not padded.
    score_rows(w, rows, keys, sizeof(T) == sizeof(float) ? a.dim : (a.dim + kLanes - 1) / kLanes * kLanes,
               w.scores + key);
  }
}

// Turns a row's scores into weights: -inf for keys that the row does not see, then exp(score - maximum).
INLINE void weigh(const Attention& a, const AttentionItem& item, const Workspace& w, int64_t r, int64_t chunk_begin,
                  int64_t begin, int64_t end) {
  float* s = w.scores + r * kChunkKeys;
  const int64_t row = item.first_row + r / a.groups, prefix = a.prefix_lens[item.request];
  const Sight seen = sight(a, item, row);
  const int64_t from = smaller(larger(seen.begin - chunk_begin, begin), end);
  const int64_t to = larger(smaller(seen.end - chunk_begin, end), from);
  const int64_t whole = (end + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = 0; i < from; i++) s[i] = -kInfinity;
  for (int64_t i = to; i < whole; i++) s[i] = -kInfinity;
  Vec best = broadcast(-kInfinity);
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Vec x = load(s + i);
    best = x > best ? x : best;
  }
  const float top = maximum(best);
  const float base = top == -kInfinity ? 0 : top;
  Vec total = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Vec p = exp_negative(load(s + i) - base);
    store(s + i, p);
    total += p;
  }
  w.maxima[r] = top;
  w.sums[r] = sum(total);
}

// Adds the weighted values of a block of keys to `Rows` by `Vecs` vectors of the output.
template <int Rows, int Vecs>
INLINE void add_values(const float* weights, const float* const* v, int64_t count, float* out, int64_t stride) {
  Vec acc[Rows][Vecs];
  for (int r = 0; r < Rows; r++)
    for (int j = 0; j < Vecs; j++) acc[r][j] = load(out + r * stride + j * kLanes);
  for (int64_t key = 0; key < count; key++) {
    Vec x[Vecs];
    for (int j = 0; j < Vecs; j++) x[j] = load(v[key] + j * kLanes);
    for (int r = 0; r < Rows; r++)
      for (int j = 0; j < Vecs; j++) acc[r][j] += x[j] * weights[r * kChunkKeys + key];
  }
  for (int r = 0; r < Rows; r++)
    for (int j = 0; j < Vecs; j++) store(out + r * stride + j * kLanes, acc[r][j]);
}

// `add_values` for all vectors of the head: `Vecs` at a time, then one at a time, then the partial last one.
template <int Rows, int Vecs>
INLINE void add_rows(const float* weights, const float** v, int64_t count, float* out, int64_t stride, int64_t dim) {
  int64_t d = 0;
  const float* moved[kBlockKeys];
  auto move = [&] {
    for (int64_t key = 0; key < count; key++) moved[key] = v[key] + d;
  };
  for (; d + Vecs * kLanes <= dim; d += Vecs * kLanes) {
    move();
    add_values<Rows, Vecs>(weights, moved, count, out + d, stride);
  }
  for (; d + kLanes <= dim; d += kLanes) {
    move();
    add_values<Rows, 1>(weights, moved, count, out + d, stride);
  }
  for (int r = 0; d < dim && r < Rows; r++) {
    Vec acc = load(out + r * stride + d);
    for (int64_t key = 0; key < count; key++) acc += load_some(v[key] + d, dim - d) * weights[r * kChunkKeys + key];
    store(out + r * stride + d, acc);
  }
}

// Weighted values of all rows over keys begin .. end - 1 of a chunk.
template <typename T>
void value_chunk(const Attention& a, const Workspace& w, const int32_t* slots, int64_t rows, int64_t kv_head,
                 int64_t begin, int64_t end) {
  const bool copied = sizeof(T) != sizeof(float) || rows > kInPlaceRows;
  memset(w.values, 0, sizeof(float) * rows * w.v_dim);
  for (int64_t first = begin; first < end; first += kBlockKeys) {
    const int64_t count = smaller(kBlockKeys, end - first);
    const float* v[kBlockKeys];
    for (int64_t key = 0; key < count; key++) {
      const T* from = at<T>(a.v, slots[first + key], kv_head);
      const T* ahead = at<T>(a.v, slots[smaller(first + key + kBlockKeys, end - 1)], kv_head);
      for (int64_t d = 0; d < a.v_dim; d += 64 / int64_t(sizeof(T))) prefetch(ahead + d);
      if (!copied) {
        v[key] = reinterpret_cast<const float*>(from);
      } else {
        v[key] = w.block + key * w.v_dim;
        widen(from, w.block + key * w.v_dim, a.v_dim, w.v_dim);
      }
    }
    const int64_t dim = copied ? (a.v_dim + kLanes - 1) / kLanes * kLanes : a.v_dim;
    const float* weights = w.scores + first;
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
      add_rows<4, 2>(weights + r * kChunkKeys, v, count, w.values + r * w.v_dim, w.v_dim, dim);
    for (; r + 2 <= rows; r += 2)
      add_rows<2, 4>(weights + r * kChunkKeys, v, count, w.values + r * w.v_dim, w.v_dim, dim);
    for (; r < rows; r++)
      add_rows<1, 8>(weights + r * kChunkKeys, v, count, w.values + r * w.v_dim, w.v_dim, dim);
  }
}

// Adds a chunk to the sum of the chunks before it. Never inlined, so that it rounds in the same way for all callers.
__attribute__((noinline)) void fold_chunk(const float* values, float maximum, float sum, float* total,
                                          float* total_maximum, float* total_sum, int64_t dim) {
  if (sum == 0) return;  // the row sees no key of this chunk
  if (*total_sum == 0) {
    memcpy(total, values, sizeof(float) * dim);
    *total_maximum = maximum;
    *total_sum = sum;
    return;
  }
  const float top = maximum > *total_maximum ? maximum : *total_maximum;
  const float old_weight = exp_negative(*total_maximum - top), weight = exp_negative(maximum - top);
  for (int64_t d = 0; d < dim; d += kLanes)
    store(total + d, load(total + d) * old_weight + load(values + d) * weight);
  *total_sum = *total_sum * old_weight + sum * weight;
  *total_maximum = top;
}

template <typename T>
void write_rows(const Attention& a, const AttentionItem& item, const Workspace& w) {
  const int64_t first = a.row_starts[item.request] + item.first_row;
  for (int64_t r = 0; r < item.rows * a.groups; r++) {
    T* out = const_cast<T*>(at<T>(a.out, first + r / a.groups, item.kv_head * a.groups + r % a.groups));
    float sum = w.total_sums[r], weight = 1;
    if (a.sinks) {
      const float sink = a.sinks[item.kv_head * a.groups + r % a.groups];
      const float top = sink > w.total_maxima[r] ? sink : w.total_maxima[r];
      weight = exp_negative(w.total_maxima[r] - top);
      sum = sum * weight + exp_negative(sink - top);
    }
    for (int64_t d = 0; d < a.v_dim; d++)
      narrow(out + d, w.total[r * w.v_dim + d] * weight / sum);  // no key seen: 0/0, NaN
  }
}

INLINE void clear_totals(const Workspace& w, int64_t rows) {
  memset(w.total, 0, sizeof(float) * rows * w.v_dim);
  memset(w.total_sums, 0, sizeof(float) * rows);
  for (int64_t r = 0; r < rows; r++) w.total_maxima[r] = -kInfinity;
}

INLINE float* partial(const Attention& a, int64_t chunk, int64_t row) {
  return a.partials + (chunk * a.partial_rows + row) * partial_size(a.v_dim);
}

template <typename T>
bool attend_keys(const Attention& a, const AttentionItem& item, const Workspace& w) {
  const int64_t rows = item.rows * a.groups;
  const int32_t* table = a.table + a.requests[item.request] * a.table_stride;
  const int64_t first_chunk = item.key_begin / kChunkKeys, last_chunk = (item.key_end - 1) / kChunkKeys;
  for (int64_t chunk = first_chunk; chunk <= last_chunk; chunk++) {
    if (item.chunk >= 0 && chunk != item.chunk) continue;
    const int64_t chunk_begin = chunk * kChunkKeys;
    const int64_t begin = larger(item.key_begin - chunk_begin, 0) / kScoreKeys * kScoreKeys;
    const int64_t end = smaller(item.key_end - chunk_begin, kChunkKeys);
    const int32_t* slots = table + chunk_begin;
    for (int64_t key = begin; key < end; key++)
      if (uint32_t(slots[key]) >= uint64_t(a.slots)) return false;
    score_chunk<T>(a, w, slots, rows, item.kv_head, begin, end);
    for (int64_t r = 0; r < rows; r++) weigh(a, item, w, r, chunk_begin, begin, end);
    value_chunk<T>(a, w, slots, rows, item.kv_head, begin, end);
    for (int64_t r = 0; r < rows; r++) {
      const float* values = w.values + r * w.v_dim;
      if (item.chunk < 0) {
        fold_chunk(values, w.maxima[r], w.sums[r], w.total + r * w.v_dim, w.total_maxima + r, w.total_sums + r,
                   w.v_dim);
      } else {
        float* out = partial(a, item.partial + chunk - first_chunk, r);
        out[0] = w.maxima[r];
        out[1] = w.sums[r];
        memcpy(out + 2, values, sizeof(float) * w.v_dim);
      }
    }
  }
  return true;
}

INLINE void write(const Attention& a, const AttentionItem& item, const Workspace& w) {
  a.out.type == Type::kFloat ? write_rows<float>(a, item, w) : write_rows<BFloat16>(a, item, w);
}

int64_t attention_workspace(const Attention& a) { return Workspace(a, nullptr).size; }

bool attend(const Attention& a, const AttentionItem& item, float* memory) {
  const Workspace w(a, memory);
  a.q.type == Type::kFloat ? load_queries<float>(a, item, w) : load_queries<BFloat16>(a, item, w);
  clear_totals(w, item.rows * a.groups);
  if (!(a.k.type == Type::kFloat ? attend_keys<float>(a, item, w) : attend_keys<BFloat16>(a, item, w))) return false;
  if (item.chunk < 0) write(a, item, w);
  return true;
}

void merge(const Attention& a, const AttentionItem& item, float* memory) {
  const Workspace w(a, memory);
  const int64_t rows = item.rows * a.groups;
  const int64_t chunks = (item.key_end - 1) / kChunkKeys - item.key_begin / kChunkKeys + 1;
  clear_totals(w, rows);
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    for (int64_t r = 0; r < rows; r++) {
      const float* part = partial(a, item.partial + chunk, r);
      fold_chunk(part + 2, part[0], part[1], w.total + r * w.v_dim, w.total_maxima + r, w.total_sums + r, w.v_dim);
    }
  }
  write(a, item, w);
}

}  // namespace
}  // namespace sglang_cpu
