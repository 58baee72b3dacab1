#!/usr/bin/env bash
# Builds the fuzzers and runs each on its seed corpus and then for FUZZ_SECONDS (10) on new inputs. Arguments name the
# fuzzers to run; without any, all. What a run finds is left in build/fuzz/found/.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
# shellcheck source=tools/setup/common.sh
source tools/setup/common.sh

build() {
    configure fuzz &&
        cmake --build build/fuzz --target fuzzers
}

# fuzz NAME: new inputs go to build/fuzz/corpus, so that a longer run builds on the last.
fuzz() {
    local name="$1" seeds="tests/fuzz/corpus/$1" work="build/fuzz/corpus/$1"
    mkdir -p "$work" build/fuzz/found &&
        "build/fuzz/tests/fuzz/${name}_fuzz" -runs=0 "$seeds" &&
        "build/fuzz/tests/fuzz/${name}_fuzz" -max_total_time="${FUZZ_SECONDS:-10}" -timeout=10 -rss_limit_mb=4096 \
            -print_final_stats=1 -artifact_prefix="build/fuzz/found/$name-" "$work" "$seeds"
}

names=("$@")
if [ "${#names[@]}" -eq 0 ]; then
    for source in tests/fuzz/*_fuzz.cc; do
        [ -f "$source" ] || continue
        name=${source##*/}
        names+=("${name%_fuzz.cc}")
    done
fi
if [ "${#names[@]}" -eq 0 ]; then
    echo "no fuzzers" >&2
    exit 0
fi
ensure_packages tools/setup/packages-serve.txt tools/setup/packages-fuzz.txt
phase fuzz_build build
status=0
for name in "${names[@]}"; do
    phase "fuzz_$name" fuzz "$name" || status=1
done
exit "$status"
