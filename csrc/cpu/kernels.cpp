// The kernels of one instruction set. setup.py compiles this file once for each, with ISA and TABLE as its names.
#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "recurrent.h"
#include "rows.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

namespace sglang_dflash {

const Kernels TABLE = {TEXT(ISA),   attention_workspace, attend,     merge,       norm,
                       norm_rope,   panel_rows,          pack_panels, linear,     conv,
                       delta,       scan,                gated_norm,  activate,   weighted_sum,
                       kLinearRows, kLinearRowsBFloat16, argmax,      top};

}  // namespace sglang_dflash
