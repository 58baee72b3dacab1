#!/usr/bin/env bash
# clang-tidy on host files: those named, or those changed since a commit (--since REV).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ "${1:-}" = --since ]; then
    mapfile -t files < <({ git diff --name-only --diff-filter=d "$2" && git ls-files --others --exclude-standard; } |
        grep -E '^(src|apps|tests|bench)/.*\.cc$' | sort -u || true)
else
    files=("$@")
fi
if [ "${#files[@]}" -eq 0 ]; then
    echo "no C++ file changed"
    exit 0
fi
[ -f build/release/compile_commands.json ] || cmake --preset release
# -Wno-*: the database has g++'s command lines, which clang need not know.
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "$(nproc)" clang-tidy-19 -p build/release --quiet \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-error
