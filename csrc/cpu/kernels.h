// What the kernels take and which instruction sets they are compiled for. Plain C++: the units compiled for one
// instruction set include no header of torch, whose inline functions the linker could pick for every machine.
#pragma once

#include <cstdint>

namespace sglang_dflash {

enum class Type : int { kFloat, kBFloat16 };

constexpr int64_t kChunkKeys = 256;  // keys per softmax; chunks start at multiples, whoever computes them
constexpr int64_t kTileRows = 32;    // query vectors that share a loaded key; more only where a group alone has more
constexpr int64_t kBlockKeys = 32;   // values that stay in the first cache while all rows read them

// A tensor whose last dimension is dense; strides in elements.
struct View {
  void* data;
  Type type;
  int64_t outer;  // between tokens, or slots
  int64_t inner;  // between heads
};

struct Attention {
  View q, k, v, out;             // [T, Hq, D], [slots, Hkv, D], [slots, Hkv, Dv], [T, Hq, Dv]
  const int32_t* table;          // [R, C]
  int64_t table_stride;
  const int64_t* requests;       // [B], rows of `table`
  const int64_t* prefix_lens;    // [B]
  const int64_t* row_starts;     // [B + 1]
  const bool* row_mask;          // [B, W, W] or null
  const int32_t* depths;         // [B, W] where there is a mask: own rows that a row sees, less one
  int64_t mask_width;            // W
  int64_t slots, kv_heads, groups, dim, v_dim;
  float scaling;
  bool causal;
  int64_t window_left;           // -1: none
  float* partials;               // [*, tile rows, Dv + 2]: a chunk's values, maximum and sum
  int64_t partial_rows;
};

// Rows `first_row ..` of a request under one KV head, over its keys `key_begin .. key_end`.
struct AttentionItem {
  int64_t request, first_row, rows, kv_head, key_begin, key_end;
  int64_t partial;  // where its first chunk's partial result lies; -1: the item folds its chunks itself
  int64_t chunk;    // of a split item, the only one to compute; -1: all
};

struct Norm {
  View x, residual, out, residual_out;  // [N, H]; residuals null without
  const void* weight;                   // [H]
  Type weight_type;
  int64_t size;
  float eps;
};

struct Heads {
  View in, out;         // rows by heads; may be the same memory
  const void* weight;   // [D], null: no norm
  Type weight_type;
  const void* cos_sin;  // [P, R]
  Type cos_sin_type;
  int64_t cos_sin_stride, heads, dim, rotary_dim;
  float eps;
};

struct Linear {
  const float* x;      // [rows, inner]
  const void* weight;  // [columns, inner]
  const void* addend;  // [rows, columns] or null; of one row for all where its stride is 0
  void* out;           // [rows, columns]
  Type type;           // of weight, addend and out
  int64_t rows, inner, x_stride, weight_stride, addend_stride, out_stride;
};

struct Best {
  float value;
  int64_t index;
};

struct Kernels {
  const char* name;
  int64_t (*attention_workspace)(const Attention&);                             // floats per thread
  bool (*attend)(const Attention&, const AttentionItem&, float*);               // false: a slot outside the cache
  void (*merge)(const Attention&, const AttentionItem&, float*);                // of a split item
  void (*norm)(const Norm&, int64_t begin, int64_t end);                        // rows
  void (*norm_rope)(const Heads&, int64_t in_row, int64_t out_row, int64_t position);
  void (*linear)(const Linear&, int64_t begin, int64_t end);                    // columns
  int64_t linear_rows, linear_rows_bfloat16;  // up to which it beats a BLAS, and one that emulates bfloat16
  Best (*argmax)(const void* values, Type, int64_t count);                      // lowest index; NaN is the largest
};

extern const Kernels kScalar;
extern const Kernels kAvx2;
extern const Kernels kAvx512;

// The widest that this machine has, or what SGLANG_DFLASH_ISA names; null where the machine lacks what it names.
const Kernels* choose_kernels(const char* asked);

}  // namespace sglang_dflash
