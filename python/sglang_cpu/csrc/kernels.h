// The arguments of the kernels, and the table of kernels of each instruction set.
//
// Plain C++: a unit that is compiled for one instruction set includes no header of torch. Otherwise the linker could
// use its copies of torch's inline functions on every machine.
#pragma once

#include <cstdint>

namespace sglang_cpu {

enum class Type : int { kFloat, kBFloat16 };

// Sizes on which two files must agree stand here once. What else they must fulfil is asserted where it is used.
constexpr int64_t kMostLanes = 16;   // floats of the widest vector
constexpr int64_t kColumnUnit = 24;  // columns of a product's work item come in multiples: of every tile's width
constexpr int64_t kMaxHead = 1024;   // dimensions of a head under norm and rotation
constexpr int64_t kChunkKeys = 256;  // keys of a partial softmax; chunks start at multiples of it on every thread
constexpr int64_t kTileRows = 32;    // query vectors that share a loaded key; more only if one group has more
constexpr int64_t kBlockKeys = 32;   // values that stay in the L1 cache while all rows read them
constexpr int64_t kMaxTaps = 8;      // of a causal convolution
constexpr int64_t kMaxKeys = 256;    // key dimensions of a recurrent head
constexpr int64_t kStateRows = 16;   // value dimensions whose state stays in the L1 cache over all rows of a request

// Always inlined, like `insert` below.
#define SHARED static inline __attribute__((always_inline))

// Floats that hold `count` in whole vectors of every instruction set.
SHARED constexpr int64_t padded(int64_t count) { return (count + kMostLanes - 1) / kMostLanes * kMostLanes; }

// Floats of a row's partial result of attention: the chunk's maximum, its sum, then its values.
SHARED constexpr int64_t partial_size(int64_t v_dim) { return 2 + padded(v_dim); }

// A tensor with a dense last dimension; strides in elements.
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
  int64_t slots, kv_heads, groups, dim, v_dim;
  float scaling;
  bool causal;
  int64_t window_left;           // -1: none
  const float* sinks;            // [Hq] or null: scores of one more key, whose value is 0
  float* partials;               // [*, partial_rows, partial_size(Dv)]
  int64_t partial_rows;
};

// `rows` rows of a request from `first_row` on, under one KV head, over keys `key_begin .. key_end - 1`.
struct AttentionItem {
  int64_t request, first_row, rows, kv_head, key_begin, key_end;
  int64_t partial;  // index of its first chunk's partial result; -1: the item adds up its chunks itself
  int64_t chunk;    // the only chunk to compute, in a split item; -1: all chunks
};

struct Norm {
  View x, residual, out, residual_out;  // [N, H]; the residuals are null if there is none
  const void* weight;                   // [H]
  Type weight_type;
  int64_t size;
  float eps;
};

struct Heads {
  View x;               // [rows, heads, D], changed in place
  const void* weight;   // [D], null: no norm
  Type weight_type;
  const void* cos_sin;  // [P, R]
  Type cos_sin_type;
  int64_t cos_sin_stride, heads, dim, rotary_dim;
  float eps;
};

struct Linear {
  const float* x;      // [rows, inner]
  const float* panels;  // the first `panel_rows` rows once more, packed by `pack_panels`
  const void* weight;  // [columns, inner]
  const void* addend;  // [rows, columns] or null; with stride 0, one row for all
  void* out;           // [rows, columns]
  Type type;           // of weight, addend and out
  int64_t rows, panel_rows, inner, x_stride, weight_stride, addend_stride, out_stride;
};

// Whether prefetches of weights should bypass the L2 cache: on AMD's family 1Ah. Measured on Zen 5, which is of it:
// docs/benchmarks/cpu-step.md.
bool prefetches_bypass_l2();

// Channels of one request's causal convolution; see `causal_conv` in ops/recurrent_reference.py.
struct Conv {
  View x, out;                   // [T, C]
  const void* weight;            // [C, taps]
  const void* bias;              // [C] or null
  Type weight_type, state_type;
  int64_t weight_stride, taps;   // taps: at most kMaxTaps
};

// The inputs before the first row, and where the last inputs go; each [C, taps - 1]. Strides in elements.
struct ConvItem {
  int64_t first_row, rows;
  const void* before;            // null: zeros
  void* after;                   // null in a verification
  void* windows;                 // in a verification: the first row's window
  void* snapshot;                // or null; the inputs before row `snapshot_row`
  int64_t snapshot_row;
  int64_t state_channel, state_tap;  // of `before`, `after` and `snapshot`
  int64_t window_row, window_channel, window_tap;
};

// The gated delta rule; see `delta_rule` in ops/recurrent_reference.py.
struct Delta {
  View qkv, out;                 // [T, 2 * Hk * K + H * V], [T, H, V]
  const float* g;                // [T, H], or [T, H, K] if `per_key`
  const float* beta;             // [T, H]
  Type state_type;
  int64_t k_heads, heads, k_dim, v_dim;
  bool per_key;
};

// The selective state space of Mamba-2; see `selective_scan` in ops/recurrent_reference.py. A head's inputs are its
// value dimensions, and the dimensions of b and c its key dimensions.
struct Scan {
  View xbc, out;                 // [T, H * V + 2 * G * K], [T, H, V]
  const float* step;             // [T, H]
  const float* decay;            // [T, H]
  const float* skip;             // [H]
  Type state_type;
  int64_t groups, heads, k_dim, v_dim;
};

// Rows of one request, value head `head`, value dimensions v_begin .. v_end - 1. States are [V, K], dense.
struct StateItem {
  int64_t first_row, rows, head, v_begin, v_end;
  const void* before;            // null: zeros
  void* after;                   // null in a verification
  void* scratch;                 // in a verification: the state after the first row
  int64_t scratch_row;           // elements between the states of two rows
  void* snapshot;                // or null; the state before row `snapshot_row`
  int64_t snapshot_row;
};

struct GatedNorm {
  View x, gate, out;             // [T, H, D]
  const void* weight;            // [D], or [H, D]
  Type weight_type;
  int64_t weight_stride;         // between heads; 0: one weight for all
  int64_t heads, size;
  float eps;
  bool silu;                     // gate times its sigmoid; else the sigmoid alone
  bool gate_first;               // the norm is that of the gated input
};

// The activation of experts: SiLU or GELU (tanh) of the gate times the other half, or the square of a ReLU, ungated.
enum class Activation : int { kSilu, kGelu, kSquaredRelu };

struct Activated {
  const void* in;      // [rows, 2 * size]: gates, then the other half; [rows, size] if ungated
  float* out;          // [rows, size]
  Type type;           // of in
  int64_t in_stride, size;
  Activation activation;
};

// Weighted sums of rows: out[t] is the sum of weights[t, k] * in[places[t, k]], in the order of k.
struct Weighted {
  const void* in;         // [*, size]
  void* out;              // [T, size]
  Type type;              // of both
  const float* weights;   // [T, count]
  const int64_t* places;  // [T, count]; -1: nothing to add
  int64_t count, size;
};

struct Best {
  float value;
  int64_t index;
};

// The best of a row's columns so far, and the sum of exp(value - best value) over them. NaN counts as -inf.
struct Softmax {
  float value;    // -inf at first
  int64_t index;  // the lowest of ties
  float sum;
};

struct Kernels {
  const char* name;
  int64_t (*attention_workspace)(const Attention&);                             // returns floats per thread
  bool (*attend)(const Attention&, const AttentionItem&, float*);               // false: a slot outside the cache
  void (*merge)(const Attention&, const AttentionItem&, float*);                // adds up the chunks of a split item
  void (*norm)(const Norm&, int64_t begin, int64_t end);                        // rows
  void (*norm_rope)(const Heads&, int64_t row, int64_t position);
  int64_t (*panel_rows)(const Linear&);                                         // the first rows, for panels; 0: none
  void (*pack_panels)(const Linear&, float* panels);                            // its rows, padded to whole panels
  void (*linear)(const Linear&, int64_t begin, int64_t end);                    // columns
  void (*conv)(const Conv&, const ConvItem&, int64_t begin, int64_t end);       // channels
  void (*delta)(const Delta&, const StateItem&);                                // at most kStateRows value dimensions
  void (*scan)(const Scan&, const StateItem&);                                  // the same
  void (*gated_norm)(const GatedNorm&, int64_t begin, int64_t end);             // rows, H for each token
  void (*activate)(const Activated&, int64_t row, int64_t begin, int64_t end);  // columns of one row
  void (*weighted_sum)(const Weighted&, int64_t begin, int64_t end);            // rows
  int64_t linear_rows, linear_rows_bfloat16;  // rows up to which it beats a BLAS, or one that emulates bfloat16
  Best (*argmax)(const void* values, Type, int64_t count);                      // lowest index of ties; NaN wins
  void (*softmax)(const void* values, Type, int64_t first_id, int64_t count, Softmax&);  // adds columns
};

extern const Kernels kScalar;
extern const Kernels kAvx2;
extern const Kernels kAvx512;

// The kernels of the instruction set `asked` (SGLANG_DFLASH_ISA); null if the machine lacks it. If `asked` is null or
// empty, those of the machine's widest instruction set.
const Kernels* choose_kernels(const char* asked);

}  // namespace sglang_cpu
