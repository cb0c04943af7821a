// Chooses the kernels for this machine.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstring>

#include "kernels.h"

namespace sglang_cpu {

#if defined(__x86_64__)
namespace {

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool is_amd_family_1a() {
  unsigned version, vendor[3], unused;
  if (!__get_cpuid(0, &version, &vendor[0], &vendor[2], &vendor[1])) return false;
  if (memcmp(vendor, "AuthenticAMD", 12) != 0 || !__get_cpuid(1, &version, &unused, &unused, &unused)) return false;
  return ((version >> 8) & 0xf) + ((version >> 20) & 0xff) == 0x1a;
}

}  // namespace

bool prefetches_bypass_l2() {
  static const bool chosen = is_amd_family_1a();
  return chosen;
}
#else
bool prefetches_bypass_l2() { return false; }
#endif

const Kernels* choose_kernels(const char* asked) {
  const bool any = asked == nullptr || *asked == '\0';
#if defined(__x86_64__)
  if ((any || strcmp(asked, "avx512") == 0) && has_avx512()) return &kAvx512;
  if ((any || strcmp(asked, "avx2") == 0) && has_avx2()) return &kAvx2;
#endif
  return any || strcmp(asked, "scalar") == 0 ? &kScalar : nullptr;
}

}  // namespace sglang_cpu
