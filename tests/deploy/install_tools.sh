#!/usr/bin/env bash
# Other people's programs for tests/deploy, into build/deploy; nothing of them is installed into the system or into the
# server's environment. What cannot be had is left out, and the tests that need it say so and are skipped.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tests/deploy
to=build/deploy
mkdir -p "$to"

python_tools() {
    [ -x "$to/python/bin/python" ] || .venv/bin/python -m venv "$to/python" || return
    "$to/python/bin/python" -m pip --disable-pip-version-check install --quiet -r "$here/requirements.txt"
}

node_schemas() {
    command -v npm >/dev/null || return
    mkdir -p "$to/node" && cp "$here/package.json" "$to/node/" || return
    timeout 300 npm install --silent --no-fund --no-audit --ignore-scripts --prefix "$to/node"
}

# Debian packages, unpacked and not installed.
debian_programs() {
    command -v apt-get >/dev/null || return
    apt-cache show "$@" >/dev/null 2>&1 || apt-get update -qq
    local name folder=$PWD/$to/debs
    for name in "$@"; do
        [ ! -d "$folder/$name" ] || continue
        rm -rf "$folder/$name.new"
        mkdir -p "$folder/$name.new"
        (cd "$folder" && apt-get download -qq "$name" && dpkg-deb -x "$name"_*.deb "$name.new" && rm "$name"_*.deb) \
            && mv "$folder/$name.new" "$folder/$name" || return
    done
}

try() { # set -e does not reach in here: the functions above return what failed
    "$@" || echo "$*: not to be had here; the tests that need it are skipped" >&2
}

try python_tools
try node_schemas
try debian_programs prometheus
try debian_programs debootstrap
