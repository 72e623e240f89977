// Asynchronous copies into shared memory and the tensor cores, sm_80 and up: cp.async, ldmatrix, mma.sync.
//
// The emulation delivers a copy only in the wait that makes it legal to read, and until then its destination is NaN.
#pragma once

#include <type_traits>

#include "cuda/numbers.cuh"

namespace pagemill::cuda {

// A place in shared memory as these instructions want it: bytes from the start of the block's window.
using SharedAddress = uint32_t;

PAGEMILL_DEVICE SharedAddress shared_address(const void* pointer) {
#ifdef PAGEMILL_EMULATION
  return ::emulation::shared_address(pointer);
#else
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
#endif
}

// ---- asynchronous copies ------------------------------------------------------------------------------------------

// 16 bytes from global memory (both addresses multiples of 16) past the L1 cache; if not `valid`, zeros, and `from` is
// not read.
PAGEMILL_DEVICE void copy_async_16(SharedAddress to, const void* from, bool valid = true) {
#ifdef PAGEMILL_EMULATION
  ::emulation::copy_async(to, from, valid);
#else
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#endif
}

// Closes a group: this thread's copies since the last commit.
PAGEMILL_DEVICE void copy_async_commit() {
#ifdef PAGEMILL_EMULATION
  ::emulation::copy_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all but the last PENDING groups of this thread have arrived. Other threads see them after a barrier.
template <int PENDING>
PAGEMILL_DEVICE void copy_async_wait() {
#ifdef PAGEMILL_EMULATION
  ::emulation::copy_async_wait(PENDING);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// ---- matrices of 8 x 8 16-bit elements from shared memory -----------------------------------------------------------

// Lanes 8 i to 8 i + 7 give the addresses of matrix i's rows, 16 bytes each, multiples of 16. Lane l gets of each matrix
// row l / 4, elements 2 (l % 4) and the next. The addresses of lanes past the last matrix are not used.
PAGEMILL_DEVICE void load_matrix(uint32_t (&to)[4], SharedAddress row) {
#ifdef PAGEMILL_EMULATION
  ::emulation::load_matrix(to, row, 4, false);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
#endif
}

PAGEMILL_DEVICE void load_matrix(uint32_t (&to)[2], SharedAddress row) {
#ifdef PAGEMILL_EMULATION
  ::emulation::load_matrix(to, row, 2, false);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(row)
               : "memory");
#endif
}

PAGEMILL_DEVICE void load_matrix(uint32_t (&to)[1], SharedAddress row) {
#ifdef PAGEMILL_EMULATION
  ::emulation::load_matrix(to, row, 1, false);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(to[0]) : "r"(row) : "memory");
#endif
}

// The same, transposed: lane l gets of each matrix column l / 4, elements of rows 2 (l % 4) and the next.
PAGEMILL_DEVICE void load_matrix_transposed(uint32_t (&to)[4], SharedAddress row) {
#ifdef PAGEMILL_EMULATION
  ::emulation::load_matrix(to, row, 4, true);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
#endif
}

PAGEMILL_DEVICE void load_matrix_transposed(uint32_t (&to)[2], SharedAddress row) {
#ifdef PAGEMILL_EMULATION
  ::emulation::load_matrix(to, row, 2, true);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(row)
               : "memory");
#endif
}

PAGEMILL_DEVICE void load_matrix_transposed(uint32_t (&to)[1], SharedAddress row) {
#ifdef PAGEMILL_EMULATION
  ::emulation::load_matrix(to, row, 1, true);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(to[0]) : "r"(row) : "memory");
#endif
}

// ---- products -----------------------------------------------------------------------------------------------------

// c += a b: a [16 x 16], b [16 x 8] of T (Bf16, F16), c [16 x 8] float32. With g = lane / 4, t = lane % 4:
//   a: rows g and g + 8 of columns 2 t and 2 t + 1 (a[0], a[1]), and of columns 2 t + 8 and 2 t + 9 (a[2], a[3])
//   b: column g of rows 2 t and 2 t + 1 (b[0]), 2 t + 8 and 2 t + 9 (b[1])
//   c: columns 2 t and 2 t + 1 of row g (c[0], c[1]) and of row g + 8 (c[2], c[3])
template <typename T>
PAGEMILL_DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, Bf16> || std::is_same_v<T, F16>);
#ifdef PAGEMILL_EMULATION
  ::emulation::multiply_add(c, a, b, std::is_same_v<T, Bf16>);
#else
  if constexpr (std::is_same_v<T, Bf16>) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#endif
}

}  // namespace pagemill::cuda
