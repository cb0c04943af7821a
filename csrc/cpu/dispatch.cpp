// Chooses the kernels for this machine.
#include <cstring>

#include "kernels.h"

namespace sglang_dflash {

#if defined(__x86_64__)
namespace {

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

}  // namespace
#endif

const Kernels* choose_kernels(const char* asked) {
  const bool any = asked == nullptr || *asked == '\0';
#if defined(__x86_64__)
  if ((any || strcmp(asked, "avx512") == 0) && has_avx512()) return &kAvx512;
  if ((any || strcmp(asked, "avx2") == 0) && has_avx2()) return &kAvx2;
#endif
  return any || strcmp(asked, "scalar") == 0 ? &kScalar : nullptr;
}

}  // namespace sglang_dflash
