// The switch is written by hand where that is known to work: ucontext's enters the kernel each time, for the signal
// mask, and costs several times as much.
#include "tests/emulation/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__)) && !defined(PAGEMILL_UCONTEXT)
#define PAGEMILL_OWN_SWITCH 1
#else
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t);
#endif

namespace emulation {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 512 << 10;  // its frames are several times as large
#else
constexpr size_t kStackBytes = 128 << 10;
#endif
constexpr size_t kGuardBytes = 64 << 10;  // a multiple of every page size in use

}  // namespace

struct Fiber {
  char* stack;
  void (*entry)(void*);
  void* argument;
#ifdef PAGEMILL_OWN_SWITCH
  void *own, *caller;  // stack pointers of the side that does not run
#else
  ucontext_t own, caller;
#endif
};

namespace {

std::vector<Fiber*> unused;

Fiber* allocate() {
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
    std::perror("emulation: no memory for a stack");
    std::abort();
  }
  Fiber* fiber = new Fiber();
  fiber->stack = static_cast<char*>(memory) + kGuardBytes;
  return fiber;
}

}  // namespace

#ifdef PAGEMILL_OWN_SWITCH

// pagemill_switch(void** save, void* to): pushes what a callee must preserve, keeps the stack pointer in *save and goes
// on where `to` was saved.
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.type pagemill_switch, @function
pagemill_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pagemill_switch, .-pagemill_switch
)");
#else
asm(R"(
.text
.p2align 4
.type pagemill_switch, %function
pagemill_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size pagemill_switch, .-pagemill_switch
)");
#endif
extern "C" void pagemill_switch(void** save, void* to) asm("pagemill_switch");

namespace {

Fiber* starting;  // a new fiber's first frame has no argument register to find itself by

void start() { starting->entry(starting->argument); }

}  // namespace

Fiber* create_fiber(void (*entry)(void*), void* argument) {
  Fiber* fiber = unused.empty() ? allocate() : unused.back();
  if (!unused.empty()) unused.pop_back();
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fiber->stack, kStackBytes);
#endif
  fiber->entry = entry;
  fiber->argument = argument;
  auto* top = reinterpret_cast<uint64_t*>(fiber->stack + kStackBytes);
#if defined(__x86_64__)
  top[-2] = reinterpret_cast<uint64_t>(&start);  // what `ret` takes, leaving the stack as a call would
  top[-1] = 0;
  fiber->own = top - 2 - 6;
#else
  top[-20 + 11] = reinterpret_cast<uint64_t>(&start);  // x30
  fiber->own = top - 20;
#endif
  return fiber;
}

void enter(Fiber* fiber) {
  starting = fiber;
  pagemill_switch(&fiber->caller, fiber->own);
}

void leave(Fiber* fiber) { pagemill_switch(&fiber->own, fiber->caller); }

#else

namespace {

Fiber* starting;

void start() { starting->entry(starting->argument); }

}  // namespace

Fiber* create_fiber(void (*entry)(void*), void* argument) {
  Fiber* fiber = unused.empty() ? allocate() : unused.back();
  if (!unused.empty()) unused.pop_back();
  fiber->entry = entry;
  fiber->argument = argument;
  getcontext(&fiber->own);
  fiber->own.uc_stack.ss_sp = fiber->stack;
  fiber->own.uc_stack.ss_size = kStackBytes;
  fiber->own.uc_link = nullptr;
  makecontext(&fiber->own, &start, 0);
  return fiber;
}

void enter(Fiber* fiber) {
  starting = fiber;
  swapcontext(&fiber->caller, &fiber->own);
}

void leave(Fiber* fiber) { swapcontext(&fiber->own, &fiber->caller); }

#endif

void destroy_fiber(Fiber* fiber) { unused.push_back(fiber); }

}  // namespace emulation
