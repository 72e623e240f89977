#!/usr/bin/env bash
# The kernels' cases under AddressSanitizer and UndefinedBehaviorSanitizer, on every level of this machine, and under
# ThreadSanitizer on the portable one: the threads are the same at all. A report fails the script.
set -euo pipefail
cd "$(dirname "$0")/../.."

build() {
  cmake -S csrc -B "build/$1" -DPAGEMILL_CASES_ONLY=ON -DPAGEMILL_OPTIMISE=-O1 -DCMAKE_BUILD_TYPE=None \
    "-DCMAKE_CXX_FLAGS=-DPAGEMILL_SHORT_CASES -O1 -g1 $2" "${@:3}" > /dev/null
  cmake --build "build/$1" --target portable_cases -j "$(nproc)" | tail -n 1
}

build asan '-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer'
build/asan/portable_cases

# Without random addresses: where the kernel scatters them widely, ThreadSanitizer of older compilers does not start.
build tsan '-fsanitize=thread -Wno-tsan' -DPAGEMILL_LEVELS=portable
setarch -R build/tsan/portable_cases
