// Large malloc blocks come from mmap and are given back on free: a kernel that allocates its workspace per call
// pays page faults for all of it each time. So every worker keeps one growing buffer.
#include "cpu/scratch.h"

#include <cstdint>
#include <new>

namespace pagemill {
namespace {

constexpr std::size_t kAlignment = 64;

struct Buffer {
  void* data = nullptr;
  std::size_t size = 0;
  ~Buffer() { release(); }
  void release() {
    if (data != nullptr) ::operator delete(data, std::align_val_t(kAlignment));
    data = nullptr;
    size = 0;
  }
};

thread_local Buffer buffer;

}  // namespace

void* thread_scratch(std::size_t bytes) {
  if (bytes > buffer.size) {
    std::size_t wanted = bytes + bytes / 2;
    buffer.release();
    buffer.data = ::operator new(wanted, std::align_val_t(kAlignment));
    buffer.size = wanted;
  }
  return buffer.data;
}

}  // namespace pagemill
