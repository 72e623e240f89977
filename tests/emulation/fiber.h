// Fibers: stacks that hand the processor to one another by a function call. A CUDA thread is one.
#pragma once

#include <cstddef>

namespace emulation {

struct Fiber;

// A stack that will run entry(argument) when first switched to; entry must never return. Stacks of destroyed fibers
// are kept and used again.
Fiber* create_fiber(void (*entry)(void*), void* argument);
void destroy_fiber(Fiber* fiber);

// Both directions of one pair: from the caller's own stack into a fiber, and from that fiber back.
void enter(Fiber* fiber);
void leave(Fiber* fiber);

}  // namespace emulation
