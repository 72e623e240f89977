#!/usr/bin/env bash
# Other people's programs for tests/deploy, into build/deploy; nothing of them is installed into the system or into the
# server's environment. Each may be missing: the script says which and why, and the tests that need it are skipped. What
# is there already is not fetched again.
set -uo pipefail # not -e: a tool that fails stops no other
cd "$(dirname "$0")/../.." || exit
here=$PWD/tests/deploy
to=$PWD/build/deploy
limit=300 # seconds for one tool
mkdir -p "$to"

missing=()
try() { # NAME COMMAND...
    local name=$1 start=$SECONDS said
    shift
    if said=$("$@" 2>&1); then
        echo "$name: here, after $((SECONDS - start)) s"
    else
        echo "$name: not to be had, the tests that need it are skipped: $(grep . <<<"$said" | tail -n 2)"
        missing+=("$name")
    fi
}

python_environment() {
    [ -x "$to/python/bin/python" ] || "${PYTHON:-.venv/bin/python}" -m venv "$to/python"
}

python_tool() {
    timeout "$limit" "$to/python/bin/python" -m pip --disable-pip-version-check install --quiet "$1"
}

node_schemas() {
    command -v npm >/dev/null || { echo "no npm"; return 1; }
    mkdir -p "$to/node" && cp "$here/package.json" "$to/node/" || return
    timeout "$limit" npm install --silent --no-fund --no-audit --ignore-scripts --prefix "$to/node"
}

debian_lists() {
    command -v apt-get >/dev/null || { echo "no apt-get"; return 1; }
    apt-cache show "$@" >/dev/null 2>&1 || timeout "$limit" apt-get update -qq
}

# A Debian package, unpacked and not installed.
debian_program() {
    local name=$1 folder=$to/debs/$1
    [ ! -d "$folder" ] || return 0
    rm -rf "$folder.new"
    mkdir -p "$folder.new/fetched" && cd "$folder.new/fetched" || return
    # as this user: apt's own may not write here
    timeout "$limit" apt-get -o APT::Sandbox::User=root download -qq "$name" || return
    dpkg-deb -x ./*.deb .. && cd "$to" && rm -r "$folder.new/fetched" && mv "$folder.new" "$folder"
}

try python python_environment
while read -r requirement; do
    try "$requirement" python_tool "$requirement"
done < <(grep -v '^#' "$here/requirements.txt")
try 'published schemas (npm)' node_schemas
programs=(prometheus debootstrap)
try "Debian's package lists" debian_lists "${programs[@]}"
for program in "${programs[@]}"; do
    try "$program" debian_program "$program"
done
echo "${#missing[@]} missing${missing:+: ${missing[*]}}"
