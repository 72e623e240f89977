// Jobs whose stages read what other threads wrote in the stage before; teams that start and end, processes that fork.
#include "team_cases.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "cpu/team.h"

namespace pagemill {
namespace {

constexpr int64_t kStages = 12, kCells = 37;

// kStages generations of a ring of cells, each the sum of three of the one before.
class Ring {
 public:
  explicit Ring(int64_t start) : cells_((kStages + 1) * kCells) {
    for (int64_t i = 0; i < kCells; ++i) cells_[i] = static_cast<uint64_t>(start + i * i);
  }

  void step(int64_t stage, int64_t begin, int64_t end) {
    const uint64_t* from = &cells_[stage * kCells];
    for (int64_t i = begin; i < end; ++i) {
      cells_[(stage + 1) * kCells + i] = from[i] + 3 * from[(i + 1) % kCells] + 5 * from[(i + kCells - 1) % kCells];
    }
  }

  bool operator==(const Ring& other) const { return cells_ == other.cells_; }

 private:
  std::vector<uint64_t> cells_;
};

struct Job {
  Stages& stages;
  Ring ring;
  int64_t grain;
  int64_t fails_at;  // stage; -1: none

  static void walk(void* pointer) {
    Job& job = *static_cast<Job*>(pointer);
    for (int64_t stage = 0; stage < kStages; ++stage) {
      job.stages.run(stage, [&](int64_t* next) {
        draw(next, kCells, job.grain, [&](int64_t begin, int64_t end) {
          if (stage == job.fails_at && begin <= 20 && 20 < end) throw std::runtime_error("as the case wants");
          job.ring.step(stage, begin, end);
        });
      });
    }
  }
};

// One job on a team; whether it gave what one thread gives.
bool computes(Stages& stages, int size, int64_t number) {
  Job job{stages, Ring(number), 1 + number % 5, -1};
  Ring expected(number);
  for (int64_t stage = 0; stage < kStages; ++stage) expected.step(stage, 0, kCells);
  stages.reset();
  run_team(size, Job::walk, &job);
  stages.rethrow();
  return job.ring == expected;
}

bool many_jobs(int64_t count, int64_t pause_us) {
  Stages stages;
  for (int64_t number = 0; number < count; ++number) {
    if (!computes(stages, 1 + static_cast<int>(number % 4), number)) return false;
    if (pause_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause_us));  // the workers go to sleep
  }
  return true;
}

bool two_callers() {
  bool good[2] = {};
  std::thread other([&] { good[0] = many_jobs(150, 0); });
  good[1] = many_jobs(150, 0);
  other.join();
  return good[0] && good[1];
}

bool failure_is_told_and_forgotten() {
  Stages stages;
  for (int64_t stage = 0; stage < kStages; stage += 5) {
    Job job{stages, Ring(stage), 2, stage};
    stages.reset();
    run_team(3, Job::walk, &job);
    bool told = false;
    try {
      stages.rethrow();
    } catch (const std::runtime_error&) {
      told = true;
    }
    if (!told || !computes(stages, 3, stage)) return false;
  }
  return true;
}

// Every child starts a team of its own, which ends with it.
bool starts_and_ends(int times) {
  for (int i = 0; i < times; ++i) {
    std::fflush(nullptr);  // or the child prints it too
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);  // a team that hangs ends here
      std::exit(many_jobs(1 + i % 3, 0) ? 0 : 1);
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) return false;
  }
  return true;
}

}  // namespace

int run_team_cases() {
  int failed = 0;
  auto check = [&](bool good, const char* name) {
    if (!good) std::printf("team: %s: wrong\n", name);
    failed += !good;
  };
  check(starts_and_ends(12), "a team starts and ends, in processes with one thread");
  check(many_jobs(400, 0), "jobs in a row");
  check(many_jobs(40, 500), "jobs with pauses");
  check(two_callers(), "two callers at once");
  check(failure_is_told_and_forgotten(), "a stage that throws");
#if !defined(PAGEMILL_SHORT_CASES)  // emulators and ThreadSanitizer lose a child of a process with threads
  check(starts_and_ends(6), "after a fork the child starts its own");
#endif
  return failed;
}

}  // namespace pagemill
