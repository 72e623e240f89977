#!/usr/bin/env bash
# The kernels' cases on this machine's levels, then cross-compiled for aarch64 and run under qemu-user: on a machine that
# has the baseline only, then neon_bf16 on one that has everything. What is not installed is said and skipped (Debian:
# g++-aarch64-linux-gnu, qemu-user); a case that fails fails the script.
set -euo pipefail
cd "$(dirname "$0")/../.."

build() {
  cmake -S csrc -B "$1" -DPAGEMILL_CASES_ONLY=ON "${@:2}" > /dev/null
  cmake --build "$1" --target portable_cases -j "$(nproc)" | tail -n 1
}

# An inline function compiled into two levels is merged by the linker into either copy: instructions that not every
# aarch64 has may stand in the levels' own functions only.
no_level_leaks() {
  aarch64-linux-gnu-objdump -d -C --no-show-raw-insn "$1" | awk '
    />:$/ { inside = /pagemill::neon_bf16::/ }
    $2 ~ /^(bfdot|bfmmla|bfcvtn?|usdot|sdot|udot)$/ { seen[$2] = 1; if (!inside) { print "outside its level: " $0; bad = 1 } }
    END { if (!seen["bfdot"] || !seen["bfmmla"] || !seen["usdot"]) { print "neon_bf16 has not the instructions it is for"; bad = 1 }
          exit bad }'
}

build build/cases
build/cases/portable_cases

if ! command -v aarch64-linux-gnu-g++ > /dev/null; then
  echo "no aarch64-linux-gnu-g++: not cross-compiled"
  exit 0
fi
build build/aarch64 -DCMAKE_TOOLCHAIN_FILE="$PWD/csrc/cmake/aarch64-linux-gnu.cmake"
no_level_leaks build/aarch64/portable_cases
if ! command -v qemu-aarch64 > /dev/null; then
  echo "no qemu-aarch64: cross-compiled, not run"
  exit 0
fi
emulate() { qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu "$1" build/aarch64/portable_cases "${@:2}"; }
emulate max neon_bf16 > build/aarch64/neon_bf16.out &
emulate cortex-a57 | tee build/aarch64/baseline.out
if grep -q neon_bf16 build/aarch64/baseline.out; then
  echo "neon_bf16 was offered where there is no bfloat16"
  exit 1
fi
wait $! || { cat build/aarch64/neon_bf16.out; exit 1; }
cat build/aarch64/neon_bf16.out
