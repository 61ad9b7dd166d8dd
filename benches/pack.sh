#!/usr/bin/env bash
# Packs what benches/gpu.sh needs on a machine without cargo and network: stripped programs, scripts and profiles.
#
#     benches/pack.sh FILE.tar.gz                                 # builds the programs
#     benches/pack.sh FILE.tar.gz NARROWS GPU_TESTS               # packs these
#
# There, unpack the archive and run narrows-gpu/benches/gpu.sh. The CUDA libraries are found in the Python environment on
# the PATH, or wherever `narrows doctor` looks for them.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
(($# == 1 || $# == 3)) || { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
archive=$(realpath -m "$1") narrows=${2:-} gpu_tests=${3:-}

if [[ -z $narrows ]]; then
    manifest=$here/Cargo.toml
    cargo build --release --manifest-path "$manifest"
    narrows=${CARGO_TARGET_DIR:-$here/target}/release/narrows
    gpu_tests=$(cargo test --release --manifest-path "$manifest" -p narrows-cuda --test gpu --no-run --message-format json |
        python3 -c 'import json, sys; print([file for line in sys.stdin if (file := json.loads(line).get("executable"))][-1])')
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
packed=$folder/narrows-gpu
mkdir -p "$packed/bin" "$packed/benches/step"
install -m 755 "$narrows" "$packed/bin/narrows"
install -m 755 "$gpu_tests" "$packed/bin/gpu-tests"
strip "$packed/bin/narrows" "$packed/bin/gpu-tests"
git -C "$here" describe --always --dirty >"$packed/bin/commit" 2>/dev/null || echo unknown >"$packed/bin/commit"
cp "$here"/benches/gpu.sh "$here"/benches/gpu_figures.py "$packed/benches"
cp "$here"/benches/step/*.py "$packed/benches/step"
cp -r "$here/profiles" "$packed/profiles"
tar -C "$folder" -czf "$archive" narrows-gpu
echo "$archive: $(du -h "$archive" | cut -f 1)"
