#!/usr/bin/env bash
# Proves and times Pagemill on one NVIDIA GPU (made for an H200), in less than eight minutes, most valuable first.
#
#   tests/gpu/run.sh            on the machine with the GPU, after tests/gpu/pack.sh elsewhere if it has no network
#   tests/gpu/run.sh --dry      on any machine: every stage on the CPU with tiny sizes, up to where a GPU is needed
#   tests/gpu/run.sh [--dry] STAGE...      the first two stages and those named
#
# Every stage has its own time limit; one that fails or runs out of time does not stop the next. Each result is in
# $OUT/results.jsonl as soon as it is known; the table comes last, in $OUT/table.md too. docs/gpu-results.md explains it.
#
# OUT     folder for results (build/gpu-results)
# PYTHON  default: .venv's where there is one, else python3
# TOTAL   seconds for everything (460; dry ten times as much)
set -uo pipefail
SCRIPT=$(realpath "$0")
cd "$(dirname "$SCRIPT")/../.."

DRY=
PATIENCE=1 # a stage's limit is so many times what stands below
if [ "${1:-}" = --dry ]; then
    DRY=--dry PATIENCE=10 # nothing is measured, and the machine may be a busy one
    shift
fi
ONLY=("$@")
for name in "$@"; do
    grep -qE "^(part|stage) ('$name'|$name) [0-9]" "$SCRIPT" && continue
    echo "usage: $0 [--dry] [STAGE...]; there is no stage '$name'" >&2
    exit 2
done
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-build/gpu-results}
TOTAL=${TOTAL:-$((460 * PATIENCE))}
mkdir -p "$OUT"
rm -f "$OUT"/{results.jsonl,table.md,stages.log,server.log} "$OUT"/profile-*.txt
export DRY PYTHON OUT PYTHONUNBUFFERED=1 PYTHONPATH=$PWD:$PWD/build/gpu/site${PYTHONPATH:+:$PYTHONPATH}
# caches of what is prepared at a first start stay with the results' machine and out of the user's
export XDG_CACHE_HOME=$PWD/build/gpu/cache HF_HUB_OFFLINE=1

is_wanted() {
    local name
    ((${#ONLY[@]})) || return 0
    for name in prepare rates "${ONLY[@]}"; do
        [ "$name" != "$1" ] || return 0
    done
    return 1
}

# stage NAME SECONDS COMMAND...: results go to stdout, what else is said to $OUT/stages.log.
stage() {
    local name=$1 limit=$(($2 * PATIENCE)) left=$((TOTAL - SECONDS)) start=$SECONDS status seconds
    shift 2
    is_wanted "$name" || return 0
    if ((left < 5)); then
        status="not run: no time left"
    else
        ((limit < left)) || limit=$left
        echo "== $name (at most $limit s)" | tee -a "$OUT/stages.log"
        timeout -k 5 "$limit" "$@" >"$OUT/lines.txt" 2>>"$OUT/stages.log"
        case $? in
        0) status=ok ;;
        124 | 137) status="out of time" ;;
        *) status=FAILED && tail -n 3 "$OUT/stages.log" ;;
        esac
        cat "$OUT/lines.txt"
    fi
    seconds=$((SECONDS - start))
    printf '{"stage": "%s", "status": "%s", "seconds": %d}\n' "$name" "$status" "$seconds" >>"$OUT/results.jsonl"
    echo "== $name: $status, $seconds s"
}

# part NAME SECONDS MODULE [ARGUMENT...]
part() {
    local name=$1 limit=$2 module=$3
    shift 3
    stage "$name" "$limit" "$PYTHON" -m "tests.gpu.$module" "$@" --out "$OUT" $DRY
}

stage prepare 150 bash tests/gpu/prepare.sh
part rates 30 rates
part 'op cases, short' 60 cases short --seconds $((55 * PATIENCE))
part engine 60 parity
part served 140 served
part 'decode attention' 40 attention decode
part generate 80 generate padded
part model 90 model
part copy_blocks 20 kernels blocks
part linear 40 kernels linear
part 'prefill attention' 25 attention prefill
part sampler 20 kernels sampler
part memcheck 45 cases memcheck --seconds $((40 * PATIENCE))
part racecheck 45 cases racecheck --seconds $((40 * PATIENCE))
part generate_batch 60 generate continuous
part 'op cases, rest' 60 cases rest --seconds $((55 * PATIENCE))

rm -f "$OUT/lines.txt"
echo
"$PYTHON" -m tests.gpu.results "$OUT" | tee "$OUT/table.md"
echo "everything took $SECONDS s"
