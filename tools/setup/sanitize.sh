#!/usr/bin/env bash
# Builds and runs the tests of the layers with threads and raw memory under sanitizers: asan (with UBSan) and tsan.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
# shellcheck source=tools/setup/common.sh
source tools/setup/common.sh

# Of these, the ones that exist.
wanted=(base cache sched sim engine text weights server runner)

build() {
    cmake --preset "$1" || return
    local targets
    targets=$(cmake --build "build/$1" --target help | sed -n 's/^\([a-z_]*_test\): .*/\1/p' | sort -u)
    targets=$(printf '%s_test\n' "${wanted[@]}" | grep -xF "$targets")
    # shellcheck disable=SC2086  # one word a target
    cmake --build "build/$1" --target $targets
}

run_tests() {
    local names
    names=$(IFS='|' && echo "${wanted[*]}")
    ctest --test-dir "build/$1" --output-on-failure --no-tests=error -j"$(nproc)" -R "^($names)_test\\."
}

# Leaks are of interest too; a data race ends the test.
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
ensure_packages tools/setup/packages-serve.txt tools/setup/packages-test.txt
for preset in "${@:-asan}"; do
    phase "build_$preset" build "$preset"
    phase "test_$preset" run_tests "$preset"
    sed -n '/tests passed, .* tests failed out of/,$p' "$log_dir/test_$preset.log"
done
