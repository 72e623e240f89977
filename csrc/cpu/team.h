// The threads of the native decoder: one wake-up per step, stages in between that wait for work, never for a thread.
//
// torch's pool forks and joins once per op, 240 times per step, and a worker that lost its core to the event loop holds
// up every one of them. Here a step is one job. Who comes late joins the stage in progress, who never comes is not
// waited for, and a stage is over when all its pieces are done, whoever did them.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

namespace pagemill {

// Calls body(context) on the calling thread and on up to size - 1 workers, which may come at any time before the
// caller's body returns, or not at all. Returns when all that came have left. One job at a time: whoever finds the team
// at work runs its own alone. body must not throw.
//
// Workers are started when first asked for, sleep between jobs, and end with the process. After a fork the child starts
// its own.
void run_team(int size, void (*body)(void*), void* context);

// Spins for a moment, then gives the core away between looks.
class Patience {
 public:
  void wait();

 private:
  int looks_ = 0;
};

// A sequence of stages that every thread of a team walks through in the same order.
class Stages {
 public:
  static constexpr int64_t kMost = 4096;

  Stages();
  ~Stages();
  Stages(const Stages&) = delete;
  Stages& operator=(const Stages&) = delete;

  // Before a job: forget what was done. No thread may be inside.
  void reset();

  // Stage `index` (ascending, below kMost): work(counter) draws pieces from the counter, which starts at 0, until none
  // are left. Returns when no piece is in anybody's hands; what they wrote is then visible here. Once work has thrown,
  // nothing more is done.
  template <typename Work>
  void run(int64_t index, const Work& work) {
    if (index < done_.load(std::memory_order_acquire)) return;
    Stage& stage = stages_[index];
    stage.inside.fetch_add(1, std::memory_order_acq_rel);
    std::atomic_thread_fence(std::memory_order_acq_rel);  // whoever finds nothing left sees us inside
    if (!failed_.load(std::memory_order_acquire)) {
      try {
        work(&stage.next);
      } catch (...) {
        fail(std::current_exception());
      }
    }
    std::atomic_thread_fence(std::memory_order_acq_rel);
    stage.inside.fetch_sub(1, std::memory_order_acq_rel);
    leave(index);
  }

  // After a job: throws what the first work to fail threw.
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  struct alignas(64) Stage {
    int64_t next;
    std::atomic<int32_t> inside;
  };

  void leave(int64_t index);
  void fail(std::exception_ptr error);

  Stage* stages_;
  std::mutex error_lock_;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
  alignas(64) std::atomic<int64_t> done_{0};  // stages below this are over
};

// Draws ranges of up to `grain` out of [0, count) from a stage's counter and calls work(begin, end).
template <typename Work>
void draw(int64_t* next, int64_t count, int64_t grain, const Work& work) {
  for (;;) {
    const int64_t begin = __atomic_fetch_add(next, grain, __ATOMIC_RELAXED);
    if (begin >= count) return;
    work(begin, begin + grain < count ? begin + grain : count);
  }
}

}  // namespace pagemill
