#!/usr/bin/env bash
# First stage of run.sh: wheels and compiled ops of build/gpu-pack, where there are any, go where Python finds them; ops
# that do not load here are built here.
#
# The wheels go into a folder for PYTHONPATH and into no virtual environment: a Python that itself lives in one would
# not hand its torch on to an environment made from it.
set -euo pipefail
cd "$(dirname "$0")/../.."
PACK=build/gpu-pack

install_wheels() {
    compgen -G "$PACK/wheels/*.whl" >/dev/null || return 0
    rm -rf build/gpu/site
    "$PYTHON" -m pip --disable-pip-version-check install -q --no-index --no-deps --no-compile --no-cache-dir \
        --target build/gpu/site "$PACK"/wheels/*.whl
}

build_here() {
    echo "prepare: there are no ops that load, building them" >&2
    rm -f build/gpu/_C.so build/gpu/_C_cuda.so
    local generator=() torch architecture PATH=$PATH:/usr/local/cuda/bin
    if command -v ninja >/dev/null; then generator=(-G Ninja); fi
    torch=$("$PYTHON" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent)')
    architecture=$("$PYTHON" -c 'import torch; a, b = torch.cuda.get_device_capability(); print(f"{a}{b}" + "a" * (a == 9))')
    cmake -S csrc -B build/gpu-built "${generator[@]}" -DPAGEMILL_CUDA=ON -DTORCH_DIR="$torch" \
        -DCMAKE_CUDA_ARCHITECTURES="$architecture-real" -DPython3_EXECUTABLE="$(command -v "$PYTHON")" >&2
    cmake --build build/gpu-built -j "$(nproc)" --target _C _C_cuda >&2
}

if [ -z "$DRY" ]; then # dry, this may be another Python than the wheels are for
    install_wheels
    mkdir -p build/gpu
    for library in _C.so _C_cuda.so; do
        [ ! -f "$PACK/lib/$library" ] || cp "$PACK/lib/$library" build/gpu/
    done
fi
status=0
# shellcheck disable=SC2086  # DRY is empty or one word
"$PYTHON" -m tests.gpu.loaded --out "$OUT" $DRY || status=$?
if ((status == 3)) && [ -z "$DRY" ]; then # the ops are of no use
    build_here
    status=0
    "$PYTHON" -m tests.gpu.loaded --out "$OUT" || status=$?
fi
exit $status
