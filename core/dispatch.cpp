#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>

#if SOFTLOOKUP_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace softlookup {

#if defined(__x86_64__)
namespace x86_64 {
extern const Kernels kernels;
}
namespace x86_64_v3 {
extern const Kernels kernels;
}
namespace x86_64_v4 {
extern const Kernels kernels;
}
namespace x86_64_v4_bf16 {
extern const Kernels kernels;
}
#if SOFTLOOKUP_AMX
namespace x86_64_v4_amx {
extern const Kernels kernels;
}
#endif
#elif defined(__aarch64__)
namespace arm64 {
extern const Kernels kernels;
}
#endif

namespace {

struct Candidate {
  const Kernels* kernels;
  bool usable;
};

#if SOFTLOOKUP_AMX
// The CPU has the tiles and their bfloat16 product, the system saves them, and it lets this process use them: it must
// be asked once, because a signal's frame grows by the eight kilobytes of the tiles' state.
bool tiles_are_granted() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned bfloat16_and_tile = 1u << 22 | 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & bfloat16_and_tile) != bfloat16_and_tile) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));  // a CPU with AVX-512 in use has it
  constexpr unsigned tile_states = 1u << 17 | 1u << 18;
  if ((low & tile_states) != tile_states) return false;
  constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long tile_data = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

// From the most general to the best.
std::vector<Candidate> candidates() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const Candidate v4 = {&x86_64_v4::kernels, static_cast<bool>(__builtin_cpu_supports("x86-64-v4"))};
  const Candidate v4_bf16 = {&x86_64_v4_bf16::kernels,
                             v4.usable && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")};
  std::vector<Candidate> all = {{&x86_64::kernels, true},
                                {&x86_64_v3::kernels, static_cast<bool>(__builtin_cpu_supports("x86-64-v3"))}};
  // Intel's bfloat16 dot runs at a quarter of the rate of its FMA (0.5 against 2 a cycle, each dot two products a
  // lane), so widening to float32 is twice as fast there; on AMD's it is the other way round.
  const bool dot_is_slow = __builtin_cpu_is("intel");
  all.insert(all.end(), {dot_is_slow ? v4_bf16 : v4, dot_is_slow ? v4 : v4_bf16});
#if SOFTLOOKUP_AMX
  static const bool granted = v4_bf16.usable && tiles_are_granted();
  all.push_back({&x86_64_v4_amx::kernels, granted});
#endif
  return all;
#elif defined(__aarch64__)
  return {{&arm64::kernels, true}};
#endif
}

const Kernels& find(const std::string& name, const char* where) {
  std::string known;
  for (const Kernels* kernels : usable_kernels()) {
    if (name == kernels->name) return *kernels;
    known += known.empty() ? kernels->name : std::string(", ") + kernels->name;
  }
  throw std::invalid_argument(std::string(where) + " is '" + name +
                              "', which is not an instruction set of this CPU and build; use one of: " + known);
}

}  // namespace

std::vector<const Kernels*> compiled_kernels() {
  std::vector<const Kernels*> all;
  for (const Candidate& candidate : candidates()) all.push_back(candidate.kernels);
  return all;
}

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
  for (const Candidate& candidate : candidates()) {
    if (candidate.usable) usable.push_back(candidate.kernels);
  }
  return usable;
}

const Kernels& kernels_named(const std::string& name) {
  if (!name.empty()) return find(name, "the instruction set");
  static const Kernels& chosen = [&]() -> const Kernels& {
    const char* wanted = std::getenv("SOFTLOOKUP_ISA");
    return wanted && *wanted ? find(wanted, "SOFTLOOKUP_ISA") : *usable_kernels().back();
  }();
  return chosen;
}

}  // namespace softlookup
