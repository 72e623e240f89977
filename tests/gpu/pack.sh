#!/usr/bin/env bash
# Collects what tests/gpu/run.sh needs on a machine with a GPU and no network: wheels (wheels.txt) for its Python, and
# the compiled ops, which load in every torch from 2.11 on. Everything goes to build/gpu-pack.
#
#   tests/gpu/pack.sh [wheels|lib]          default: both
#
# PYTHON_THERE  Python of that machine (3.12)
# ARCHITECTURES of its GPU for nvcc (90a-real: H100, H200), as in CMAKE_CUDA_ARCHITECTURES
# PIP_ARGS      more arguments for pip, as in the Makefile
set -euo pipefail
cd "$(dirname "$0")/../.."

PACK=build/gpu-pack
MOST_MIB=64 # with the working tree: what travels at most
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
PATH=$PWD/.venv/bin:$PATH

pack_wheels() {
    local platforms=() name
    for name in manylinux_2_{35..17} manylinux2014 manylinux1; do # pip takes each for itself alone
        platforms+=(--platform "${name}_x86_64")
    done
    rm -rf "$PACK/wheels"
    # shellcheck disable=SC2086  # PIP_ARGS is several words
    "$PYTHON" -m pip --disable-pip-version-check download -q ${PIP_ARGS:-} --no-deps --only-binary=:all: \
        --implementation cp --python-version "${PYTHON_THERE:-3.12}" "${platforms[@]}" -d "$PACK/wheels" -r tests/gpu/wheels.txt
}

# In a folder below build/gpu, where engine/ops.py does not look: this machine goes on with its own.
pack_lib() {
    [ "$(uname -m)" = x86_64 ] || echo "built on $(uname -m): that machine must be of this kind, too" >&2
    local generator=() torch
    torch=$("$PYTHON" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent)')
    if command -v ninja >/dev/null; then generator=(-G Ninja); fi
    cmake -S csrc -B build/gpu/lib "${generator[@]}" -DPAGEMILL_CUDA=ON -DTORCH_DIR="$torch" \
        -DCMAKE_CUDA_ARCHITECTURES="${ARCHITECTURES:-90a-real}" -DPython3_EXECUTABLE="$(realpath -s "$PYTHON")" >/dev/null
    cmake --build build/gpu/lib -j "${JOBS:-$(nproc)}" --target _C _C_cuda >build/gpu/lib/build.log 2>&1 || {
        tail -n 40 build/gpu/lib/build.log >&2
        return 1
    }
    mkdir -p "$PACK/lib"
    cp build/gpu/lib/_C.so build/gpu/lib/_C_cuda.so "$PACK/lib/"
}

for part in ${1:-wheels lib}; do
    echo "pack: $part"
    "pack_$part"
done
tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 du -cb 2>/dev/null | awk '/\ttotal$/ {sum += $1} END {print sum}')
pack=$(du -sb "$PACK" | cut -f1)
echo "pack: $((pack >> 20)) MiB in $PACK, $((tree >> 20)) MiB in the working tree, together $(((pack + tree) >> 20)) of $MOST_MIB MiB"
(((pack + tree) >> 20 < MOST_MIB))
