#!/usr/bin/env bash
# The kernels' cases on this machine's levels, then cross-compiled for aarch64 and run under qemu-user. What is not
# installed is said and skipped (Debian: g++-aarch64-linux-gnu, qemu-user); a case that fails fails the script.
set -euo pipefail
cd "$(dirname "$0")/../.."

cmake -S csrc -B build/cases -DPAGEMILL_CASES_ONLY=ON > /dev/null
cmake --build build/cases --target portable_cases -j "$(nproc)" | tail -n 1
build/cases/portable_cases

if ! command -v aarch64-linux-gnu-g++ > /dev/null; then
  echo "no aarch64-linux-gnu-g++: not cross-compiled"
  exit 0
fi
cmake -S csrc -B build/aarch64 -DPAGEMILL_CASES_ONLY=ON \
  -DCMAKE_TOOLCHAIN_FILE="$PWD/csrc/cmake/aarch64-linux-gnu.cmake" > /dev/null
cmake --build build/aarch64 --target portable_cases -j "$(nproc)" | tail -n 1
if command -v qemu-aarch64 > /dev/null; then
  qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/portable_cases
else
  echo "no qemu-aarch64: cross-compiled, not run"
fi
