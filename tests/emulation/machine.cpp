// Launches, the scheduler, barriers, and the reports of what went wrong.
#include "tests/emulation/machine.h"

#include <cstdarg>
#include <cstdio>
#include <map>
#include <numeric>

namespace emulation {

Place place;
Block block;

namespace {

constexpr int kLaunchFailure = 719, kInvalidValue = 1, kInvalidConfiguration = 9;

std::string report;        // empty: nothing is wrong
int error = 0;
bool failed = false;       // the running launch has ended early
uint64_t state = 0;        // of the random sequence
uint64_t seed = 0;
std::map<const void*, int64_t> shared_allowed;

std::string where(const Thread& thread) {
  char text[160];
  std::snprintf(text, sizeof text, "thread %d (warp %d, lane %d) of block (%u, %u, %u)", thread.index,
                thread.index / kLanes, thread.index % kLanes, place.block.x, place.block.y, place.block.z);
  return text;
}

void set_report(int code, const std::string& text) {
  error = code;
  report = std::string(block.configuration->name) + ": " + text;
}

std::string format_text(const char* format, va_list arguments) {
  char text[512];
  std::vsnprintf(text, sizeof text, format, arguments);
  return text;
}

void run_thread(void* pointer) {
  Thread& thread = *static_cast<Thread*>(pointer);
  block.body(block.arguments);
  if (!thread.copies.empty()) fail("ends with %zu asynchronous copies it did not wait for", thread.copies.size());
  ++block.num_ended;
  block.warps[thread.index / kLanes].ready &= ~(1u << thread.index % kLanes);
  thread.waits_in = "its end";
  leave(thread.fiber);
}

// ---- the scheduler --------------------------------------------------------------------------------------------------

void resume(Thread& thread) {
  block.running = &thread;
  place.thread = dim3(static_cast<unsigned>(thread.index), 0, 0);
  enter(thread.fiber);
}

// Lets one warp's lanes run, each to its next meeting, for a few rounds.
void run_warp(int warp) {
  uint32_t& ready = block.warps[warp].ready;
  int rounds = 1 << random_number() % 6;
  while (ready != 0 && rounds-- > 0 && !failed) {
    const uint32_t lanes = ready;
    const int first = static_cast<int>(random_number() % kLanes);
    for (int i = 0; i < kLanes && !failed; ++i) {
      const int lane = (first + i) % kLanes;
      if (lanes >> lane & 1) resume(block.threads[warp * kLanes + lane]);
    }
  }
}

void report_deadlock() {
  std::map<std::string, std::vector<int>> waiting;
  for (int i = 0; i < block.num_threads; ++i) waiting[block.threads[i].waits_in].push_back(i);
  std::string text = "deadlock in block (" + std::to_string(place.block.x) + ", " + std::to_string(place.block.y) +
                     ", " + std::to_string(place.block.z) + "):";
  for (const auto& [name, threads] : waiting) {
    text += " " + std::to_string(threads.size()) + " threads at " + name + ", the first is " +
            std::to_string(threads.front()) + ";";
  }
  set_report(kLaunchFailure, text);
  failed = true;
}

void run_block() {
  const int num_warps = block.num_threads / kLanes;
  for (int w = 0; w < num_warps; ++w) {
    block.warps[w] = Warp{};
    block.warps[w].ready = ~0u;
  }
  for (Barrier& barrier : block.barriers) barrier = Barrier{};
  block.num_ended = 0;
  for (int i = 0; i < block.num_threads; ++i) {
    Thread& thread = block.threads[i];
    thread.index = i;
    thread.waits_in = nullptr;
    thread.group = 0;
    thread.copies.clear();
    thread.fiber = create_fiber(&run_thread, &thread);
  }
  std::vector<int> runnable;
  while (block.num_ended < block.num_threads && !failed) {
    runnable.clear();
    for (int w = 0; w < num_warps; ++w)
      if (block.warps[w].ready != 0) runnable.push_back(w);
    if (runnable.empty()) {
      report_deadlock();
    } else {
      run_warp(runnable[random_number() % runnable.size()]);
    }
  }
  for (int i = 0; i < block.num_threads; ++i) destroy_fiber(block.threads[i].fiber);
}

// ---- launches ---------------------------------------------------------------------------------------------------------

bool refuse(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  set_report(kInvalidConfiguration, format_text(format, arguments));
  va_end(arguments);
  return false;
}

bool can_launch(const Configuration& c) {
  if (c.threads < 1 || c.threads > kMaxThreads) return refuse("a block of %ld threads", long(c.threads));
  if (c.threads % kLanes != 0) return refuse("a block of %ld threads is not made of whole warps", long(c.threads));
  if (c.grid.x < 1 || c.grid.y < 1 || c.grid.z < 1 || c.grid.x > 0x7fffffffu || c.grid.y > 65535 || c.grid.z > 65535)
    return refuse("a grid of %u x %u x %u blocks", c.grid.x, c.grid.y, c.grid.z);
  const auto allowed = shared_allowed.find(c.kernel);
  const int64_t limit = allowed == shared_allowed.end() ? kSharedWithoutAsking : allowed->second;
  if (c.shared_bytes < 0 || c.shared_bytes > limit)
    return refuse("%ld bytes of shared memory where %ld are allowed", long(c.shared_bytes), long(limit));
  return true;
}

}  // namespace

uint64_t random_number() {  // splitmix64 (Steele, Lea, Flood 2014)
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  set_report(kLaunchFailure, where(*block.running) + " " + format_text(format, arguments));
  va_end(arguments);
  failed = true;
  leave(block.running->fiber);
  __builtin_unreachable();  // nobody enters it again
}

void run_grid(const Configuration& configuration, void (*body)(void*), void* arguments) {
  if (error != 0) return;  // as after an error on a real stream
  block.configuration = &configuration;
  if (!can_launch(configuration)) return;
  block.body = body;
  block.arguments = arguments;
  block.num_threads = static_cast<int>(configuration.threads);
  state = seed;
  failed = false;
  place.block_dim = dim3(static_cast<unsigned>(configuration.threads));
  place.grid_dim = configuration.grid;
  const uint64_t blocks = uint64_t(configuration.grid.x) * configuration.grid.y * configuration.grid.z;
  uint64_t step = random_number() % blocks;  // blocks run in the order of multiples of a step, in no way in order
  while (std::gcd(step, blocks) != 1) ++step;
  uint64_t index = random_number() % blocks;
  for (uint64_t i = 0; i < blocks && !failed; ++i, index = (index + step) % blocks) {
    place.block.x = unsigned(index % configuration.grid.x);
    place.block.y = unsigned(index / configuration.grid.x % configuration.grid.y);
    place.block.z = unsigned(index / configuration.grid.x / configuration.grid.y);
    begin_shared(configuration.shared_bytes);
    run_block();
    if (!failed && !shared_is_intact()) {
      set_report(kLaunchFailure, "shared memory was written past its end");
      failed = true;
    }
    end_shared();
  }
}

int allow_shared(const void* kernel, int64_t bytes) {
  if (bytes > kSharedLimit) return kInvalidValue;
  shared_allowed[kernel] = bytes > kSharedWithoutAsking ? bytes : kSharedWithoutAsking;
  return 0;
}

int status() { return error; }

// ---- meetings ---------------------------------------------------------------------------------------------------------

namespace {

void park(const char* name) {
  Thread& thread = *block.running;
  thread.waits_in = name;
  block.warps[thread.index / kLanes].ready &= ~(1u << thread.index % kLanes);
  leave(thread.fiber);
}

void wake(Thread& thread) {
  thread.waits_in = nullptr;
  block.warps[thread.index / kLanes].ready |= 1u << thread.index % kLanes;
}

// Returns how many of the threads came with `counted`.
int meet_block(int id, int wanted, bool counted, const char* name) {
  Thread& thread = *block.running;
  Barrier& barrier = block.barriers[id];
  if (barrier.arrived == 0) barrier.wanted = wanted;
  if (barrier.wanted != wanted) fail("waits for %d threads at barrier %d, others for %d", wanted, id, barrier.wanted);
  barrier.counted += counted;
  const uint32_t turn = barrier.turn;
  if (++barrier.arrived == wanted) {
    barrier.results[turn & 1] = barrier.counted;
    barrier.arrived = barrier.counted = 0;
    ++barrier.turn;
    for (int i = 0; i < block.num_threads; ++i) {
      if (barrier.waiting[i]) wake(block.threads[i]);
      barrier.waiting[i] = false;
    }
  } else {
    barrier.waiting[thread.index] = true;
    park(name);
  }
  return barrier.results[turn & 1];
}

}  // namespace

void meet_warp(const char* name, void* brought, void (*finish)(void**)) {
  Thread& thread = *block.running;
  Warp& warp = block.warps[thread.index / kLanes];
  const int lane = thread.index % kLanes;
  if (warp.arrived == 0) warp.name = name;
  if (std::strcmp(warp.name, name) != 0) fail("is in %s, other lanes of its warp are in %s", name, warp.name);
  warp.lanes[lane] = brought;
  if (++warp.arrived < kLanes) return park(name);
  warp.arrived = 0;
  finish(warp.lanes);
  const int first = thread.index - lane;
  for (int i = 0; i < kLanes; ++i) wake(block.threads[first + i]);
}

void sync_block() { meet_block(0, block.num_threads, false, "sync_block"); }

int sync_block_count(bool condition) { return meet_block(0, block.num_threads, condition, "sync_block_count"); }

void sync_threads(int id, int threads) {
  if (id < 1 || id >= kBarriers) fail("waits at barrier %d; there are 1 to %d", id, kBarriers - 1);
  if (threads < kLanes || threads > block.num_threads || threads % kLanes != 0)
    fail("waits for %d threads at a barrier of a block of %d", threads, block.num_threads);
  meet_block(id, threads, false, "sync_threads");
}

}  // namespace emulation

// ---- for the tests ----------------------------------------------------------------------------------------------------

#define PAGEMILL_EXPORT extern "C" __attribute__((visibility("default")))

// The order of everything from here on.
PAGEMILL_EXPORT void emulation_seed(uint64_t seed) { emulation::seed = seed; }

// What went wrong since the last call, or an empty text. Valid until the next call.
PAGEMILL_EXPORT const char* emulation_report() {
  static std::string told;
  told.swap(emulation::report);
  emulation::report.clear();
  emulation::error = 0;
  return told.c_str();
}
