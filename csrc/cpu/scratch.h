// Memory a worker thread reuses from call to call. Freed when the thread ends.
#pragma once

#include <cstddef>

namespace pagemill {

// At least `bytes` bytes, 64-byte aligned, contents undefined, valid until this thread's next call.
// Throws std::bad_alloc.
void* thread_scratch(std::size_t bytes);

}  // namespace pagemill
