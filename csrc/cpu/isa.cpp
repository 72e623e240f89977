// Chooses the level with cpuid, on Arm by the kernel's list of features. AMX also needs the kernel's leave to use tile
// registers, asked for once per process.
#include "cpu/isa.h"

#include <atomic>

#if defined(PAGEMILL_WITH_amx) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(PAGEMILL_WITH_neon_bf16) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace pagemill {

#define PAGEMILL_EXTERN_TABLE(level) \
  namespace level {                  \
  extern const KernelTable kTable;   \
  }
PAGEMILL_EXTERN_TABLE(portable)
#ifdef PAGEMILL_WITH_avx2
PAGEMILL_EXTERN_TABLE(avx2)
#endif
#ifdef PAGEMILL_WITH_avx512
PAGEMILL_EXTERN_TABLE(avx512)
#endif
#ifdef PAGEMILL_WITH_avx512_bf16
PAGEMILL_EXTERN_TABLE(avx512_bf16)
#endif
#ifdef PAGEMILL_WITH_amx
PAGEMILL_EXTERN_TABLE(amx)
#endif
#ifdef PAGEMILL_WITH_amx_emulated
PAGEMILL_EXTERN_TABLE(amx_emulated)
#endif
#ifdef PAGEMILL_WITH_neon
PAGEMILL_EXTERN_TABLE(neon)
#endif
#ifdef PAGEMILL_WITH_neon_bf16
PAGEMILL_EXTERN_TABLE(neon_bf16)
#endif

namespace {

bool always() { return true; }

#if defined(PAGEMILL_WITH_avx2) || defined(PAGEMILL_WITH_avx512)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

#if defined(PAGEMILL_WITH_avx512)
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(PAGEMILL_WITH_avx512_bf16)
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

#ifdef PAGEMILL_WITH_amx
bool has_amx() {
#ifdef __linux__
  if (!has_avx512_bf16()) return false;
  // cpuid leaf 7, edx: bit 22 AMX-BF16, bit 24 AMX-TILE (gcc 12's __builtin_cpu_supports does not know them).
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  if (!((edx >> 22) & 1) || !((edx >> 24) & 1)) return false;
  constexpr long kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
  static const bool permitted = syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
  return permitted;
#else
  return false;
#endif
}
#endif

#ifdef PAGEMILL_WITH_neon_bf16
bool has_neon_bf16() {
#ifdef __linux__
  constexpr unsigned long kBase = HWCAP_ASIMDDP | HWCAP_ATOMICS, kDots = HWCAP2_BF16 | HWCAP2_I8MM;  // Armv8.2 has atomics
  return (getauxval(AT_HWCAP) & kBase) == kBase && (getauxval(AT_HWCAP2) & kDots) == kDots;
#else
  return false;
#endif
}
#endif

struct Level {
  const char* name;
  const KernelTable* table;
  bool (*supported)();
  bool automatic;  // may be chosen without being asked for
};

constexpr Level kLevels[] = {
    {"portable", &portable::kTable, always, true},
#ifdef PAGEMILL_WITH_avx2
    {"avx2", &avx2::kTable, has_avx2, true},
#endif
#ifdef PAGEMILL_WITH_avx512
    {"avx512", &avx512::kTable, has_avx512, true},
#endif
#ifdef PAGEMILL_WITH_avx512_bf16
    {"avx512_bf16", &avx512_bf16::kTable, has_avx512_bf16, true},
#endif
#ifdef PAGEMILL_WITH_amx
    {"amx", &amx::kTable, has_amx, true},
#endif
#ifdef PAGEMILL_WITH_amx_emulated
    {"amx_emulated", &amx_emulated::kTable, has_avx512_bf16, false},
#endif
#ifdef PAGEMILL_WITH_neon
    {"neon", &neon::kTable, always, true},
#endif
#ifdef PAGEMILL_WITH_neon_bf16
    {"neon_bf16", &neon_bf16::kTable, has_neon_bf16, true},
#endif
};

const Level* best_level() {
  const Level* best = &kLevels[0];
  for (const Level& level : kLevels) {
    if (level.automatic && level.supported()) best = &level;
  }
  return best;
}

std::atomic<const Level*>& active() {
  static std::atomic<const Level*> level{best_level()};
  return level;
}

}  // namespace

const KernelTable& kernels() { return *active().load(std::memory_order_relaxed)->table; }

std::string level_name() { return active().load(std::memory_order_relaxed)->name; }

std::string available_levels() {
  std::string names;
  for (const Level& level : kLevels) {
    if (!level.supported()) continue;
    if (!names.empty()) names += ',';
    names += level.name;
  }
  return names;
}

bool set_level(const std::string& name) {
  if (name == "auto") {
    active().store(best_level());
    return true;
  }
  for (const Level& level : kLevels) {
    if (name == level.name && level.supported()) {
      active().store(&level);
      return true;
    }
  }
  return false;
}

}  // namespace pagemill
