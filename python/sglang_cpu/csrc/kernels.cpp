// The kernels of one instruction set. ops/build_native.py compiles this file once for each: ISA and TABLE are its names.
#include "attention_kernels.h"
#include "expert_kernels.h"
#include "linear_kernels.h"
#include "recurrent_kernels.h"
#include "row_kernels.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

namespace sglang_cpu {

const Kernels TABLE = {TEXT(ISA),   attention_workspace, attend,     merge,       norm,
                       norm_rope,   panel_rows,          pack_panels, linear,     conv,
                       delta,       scan,                gated_norm,  activate,   weighted_sum,
                       kLinearRows, kLinearRowsBFloat16, argmax,      softmax};

}  // namespace sglang_cpu
