// The emulated device: one block at a time, its threads as fibers, in an order drawn from a seed.
//
// A thread runs until it has to meet others: at a barrier of its block, or in an operation of its warp. There it parks;
// the last to arrive does the work of all and makes the others ready again. A scheduler picks the next warp, how long
// it may stay ahead of the others and which lane begins from a random sequence, so that code which is right only in one
// order fails under some seed. Nothing is preempted between two meetings.
//
// What a GPU reports late or never ends a launch with a report: blocks that cannot go on, lanes of a warp in different
// operations, misaligned or stray addresses, shared memory over the limits, grids that cannot be launched, asynchronous
// copies nobody waits for. The launcher returns an error, and the report tells which thread of which kernel.
//
// Not modelled: the order in which memory writes are seen, bank conflicts, occupancy, time, the error of approximate
// instructions, the order in which tensor cores add.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/emulation/device.h"
#include "tests/emulation/fiber.h"

namespace emulation {

constexpr int kLanes = 32, kMaxThreads = 1024, kBarriers = 16;
constexpr int64_t kSharedWithoutAsking = 48 << 10, kSharedLimit = 227 << 10;

struct AsyncCopy {
  unsigned char* to;
  unsigned char bytes[16];
  uint32_t group;
};

struct Thread {
  Fiber* fiber;
  int index;
  const char* waits_in;  // null: it can run
  uint32_t group;        // of asynchronous copies, counted by commits
  std::vector<AsyncCopy> copies;
};

struct Warp {
  uint32_t ready;     // lanes that can run
  int arrived;        // in the operation that `name` tells
  const char* name;
  void* lanes[kLanes];  // what each of them brought
};

struct Barrier {
  int arrived, wanted, counted;
  int results[2];  // by the parity of the barrier's turn
  uint32_t turn;
  bool waiting[kMaxThreads];
};

struct Block {
  const Configuration* configuration;
  void (*body)(void*);
  void* arguments;
  int num_threads, num_ended;
  Thread threads[kMaxThreads];
  Warp warps[kMaxThreads / kLanes];
  Barrier barriers[kBarriers];
  Thread* running;
};
extern Block block;

// Parks the running thread in `name` until every lane of its warp is there; the last one calls finish with what each
// lane brought, by lane.
void meet_warp(const char* name, void* brought, void (*finish)(void** lanes));

// Ends the launch with a report about the running thread. Does not return.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

uint64_t random_number();

// ---- memory.cpp ---------------------------------------------------------------------------------------------------

void begin_shared(int64_t bytes);  // fills it with 0xff: NaN in every float type
bool shared_is_intact();           // nothing was written past its end
void end_shared();

}  // namespace emulation
