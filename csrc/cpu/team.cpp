#include "cpu/team.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#endif

namespace pagemill {
namespace {

constexpr int kLooksAwake = 400;  // pauses before yielding: some ten microseconds
constexpr std::chrono::microseconds kAwake{150};  // between two jobs: a step's draw comes so soon behind its forward

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

// state: bits 0-15 workers inside the job, bit 16 whether it may still be joined, bits 32-63 the job's number.
constexpr uint64_t kInside = 0xffff, kOpen = uint64_t(1) << 16, kJob = uint64_t(1) << 32;

// While it lives, threads are born deaf to signals, which are the application's threads' business, but for those that a
// thread's own fault raises.
class NoSignals {
 public:
#if defined(__unix__) || defined(__APPLE__)
  NoSignals() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
#else
  NoSignals() {}
#endif
};

class Team {
 public:
  void run(int size, void (*body)(void*), void* context) {
    if (size < 2 || !busy_.try_lock()) return body(context);
    std::lock_guard<std::mutex> free_again(busy_, std::adopt_lock);
    body_ = body;
    context_ = context;
    size_ = size;
    grow(size - 1);
    open();
    body(context);
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    Patience patience;
    while (state_.load(std::memory_order_acquire) & kInside) patience.wait();
  }

  // At exit, before what the workers use is destroyed.
  void end() {
    if (!busy_.try_lock()) return;  // somebody computes to the end; for good, so that nobody begins
    {
      std::lock_guard<std::mutex> lock(sleep_);
      ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

 private:
  void open() {
    const uint64_t job = (state_.load(std::memory_order_relaxed) / kJob + 1) * kJob;
    state_.store(job | kOpen, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    { std::lock_guard<std::mutex> lock(sleep_); }  // a sleeper between its last look and its wait would miss the call
    wake_.notify_all();
  }

  void grow(int wanted) {
    if (static_cast<int>(workers_.size()) >= wanted) return;
    const NoSignals mask;
    try {
      while (static_cast<int>(workers_.size()) < wanted) {
        const int index = static_cast<int>(workers_.size());
        workers_.emplace_back([this, index] { work(index); });
      }
    } catch (const std::system_error&) {  // no thread to be had: fewer do
    }
  }

  void work(int index) {
    uint64_t seen = 0;
    while (wait_for_job(seen)) {
      uint64_t state = state_.load(std::memory_order_acquire);
      seen = state / kJob;
      while ((state & kOpen) && state / kJob == seen) {
        if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
        if (index + 1 < size_) body_(context_);
        state_.fetch_sub(1, std::memory_order_acq_rel);
        break;
      }
    }
  }

  // Returns at a job after number `seen`; false at the end of the process.
  bool wait_for_job(uint64_t seen) {
    const auto end = std::chrono::steady_clock::now() + kAwake;
    do {
      for (int look = 0; look < kLooksAwake; ++look) {
        if (state_.load(std::memory_order_acquire) / kJob != seen) return true;
        pause_core();
      }
    } while (std::chrono::steady_clock::now() < end);
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return ending_ || state_.load(std::memory_order_seq_cst) / kJob != seen; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return !ending_;
  }

  std::mutex busy_;
  void (*body_)(void*) = nullptr;
  void* context_ = nullptr;
  int size_ = 0;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
  bool ending_ = false;
  std::vector<std::thread> workers_;
};

long process_id() {
#if defined(__unix__) || defined(__APPLE__)
  return static_cast<long>(getpid());
#else
  return 0;
#endif
}

// Never destroyed: a thread may still compute while the process ends, and after a fork the parent's team, whose threads
// the child does not have, can only be left lying.
struct Place {
  std::mutex lock;
  Team* team = nullptr;
  long process = 0;
};

Place& place() {
  static Place* const made = new Place;
  return *made;
}

Team& team() {
  Place& here = place();
  std::lock_guard<std::mutex> lock(here.lock);
  const long process = process_id();
  if (here.team == nullptr || here.process != process) {
    if (here.team == nullptr) {
#if defined(__unix__) || defined(__APPLE__)
      pthread_atfork([] { place().lock.lock(); }, [] { place().lock.unlock(); }, [] { place().lock.unlock(); });
#endif
      std::atexit([] {
        if (place().process == process_id()) place().team->end();
      });
    }
    here.team = new Team;
    here.process = process;
  }
  return *here.team;
}

}  // namespace

void run_team(int size, void (*body)(void*), void* context) {
  if (size < 2) return body(context);
  team().run(size, body, context);
}

void Patience::wait() {
  if (++looks_ < kLooksAwake) return pause_core();
  std::this_thread::yield();
}

Stages::Stages() : stages_(new Stage[kMost]()) {}

Stages::~Stages() { delete[] stages_; }

void Stages::reset() {
  const int64_t used = done_.load(std::memory_order_acquire);
  for (int64_t i = 0; i < used; ++i) stages_[i].next = 0;
  done_.store(0, std::memory_order_release);
  failed_.store(false, std::memory_order_release);
  error_ = nullptr;
}

void Stages::leave(int64_t index) {
  Patience patience;
  while (stages_[index].inside.load(std::memory_order_acquire) != 0) patience.wait();
  int64_t done = done_.load(std::memory_order_relaxed);
  while (done <= index && !done_.compare_exchange_weak(done, index + 1, std::memory_order_acq_rel)) {
  }
}

void Stages::fail(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(error_lock_);
  if (!error_) error_ = error;
  failed_.store(true, std::memory_order_release);
}

}  // namespace pagemill
