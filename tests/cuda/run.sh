#!/usr/bin/env bash
# Every check that needs a CUDA device; exit status 1 when one fails.
#   tests/cuda/run.sh [DIR] [--quick] [--jobs N] [--sanitize]
# DIR holds tessera and the cuda_*_test programs somewhere below it: build/cuda, or where they were copied to. --quick
# leaves out what takes over a minute: the recall sets, the quantised copies, batch invariance beyond the first runs.
# --jobs N cuts the test programs into N parts that run at once, since the references on the CPU take most of the time;
# times are not measured here, so nothing minds. The servers' checks come last, one after another. NumPy is needed;
# where the Python package openai is missing, the client's tests are skipped with a word. --sanitize adds the small
# cases of each operator under compute-sanitizer's memcheck and initcheck; one that takes over five minutes is cut
# short, and shown so.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dir=$root/build/cuda
quick=
sanitize=
jobs=1
while [ $# -gt 0 ]; do
    case $1 in
    --quick) quick=1 ;;
    --sanitize) sanitize=1 ;;
    --jobs)
        jobs=${2-}
        if ! [[ $jobs =~ ^[1-9][0-9]?$ ]]; then
            echo "tests/cuda/run.sh: --jobs needs a number from 1 to 99, not '$jobs'" >&2
            exit 2
        fi
        shift
        ;;
    -*)
        echo "tests/cuda/run.sh: unknown flag $1 (known: --quick, --jobs N, --sanitize)" >&2
        exit 2
        ;;
    *) dir=$(cd "$1" && pwd) || exit 2 ;;
    esac
    shift
done
tessera=$(find "$dir" -maxdepth 2 -name tessera -type f -perm -u+x | head -1)
if [ -z "$tessera" ]; then
    echo "tests/cuda/run.sh: no program tessera in $dir: build it with PRESET=cuda make build" >&2
    exit 2
fi

if [ -n "$sanitize" ] && ! command -v compute-sanitizer >/dev/null; then
    echo "tests/cuda/run.sh: --sanitize needs compute-sanitizer of the CUDA toolkit on the PATH" >&2
    exit 2
fi

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
checks=0

# Runs in the background when there are several jobs; the log is shown when it ends.
check() { # NAME COMMAND...
    local name=$1 log
    shift
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do
        wait -n
    done
    log=$logs/$(printf '%03d' "$checks")
    checks=$((checks + 1))
    one "$log" "$name" "$@" &
    [ "$jobs" -gt 1 ] || wait
}
one() { # LOG NAME COMMAND...
    local log=$1 name=$2 start=$SECONDS word=ok
    shift 2
    "$@" >"$log.text" 2>&1
    case $? in
    0) ;;
    124) word=cut ;; # by its timeout: no failure, and no proof
    *) word=FAIL ;;
    esac
    printf '%-5s %s (%d s)\n' "$word" "$name" $((SECONDS - start)) >"$log.result"
    printf '== %s\n%s\n' "$name" "$(<"$log.text")"
}

whole=(--fp8 --recall)
some=()
if [ -n "$quick" ]; then
    whole=()
    some=(--runs "16 at")
fi
while read -r program; do
    for ((part = 0; part < jobs; ++part)); do
        check "$(basename "$program"), part $((part + 1)) of $jobs" env GTEST_TOTAL_SHARDS="$jobs" \
            GTEST_SHARD_INDEX="$part" "$program" --gtest_brief=1
    done
done < <(find "$dir" -name 'cuda_*_test' -type f -perm -u+x | sort)
if [ -n "$sanitize" ]; then
    while read -r operator _; do
        for tool in memcheck initcheck; do
            check "$tool $operator" timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 1 \
                "$tessera" ops test "$operator" --device cuda --small
        done
    done < <("$tessera" ops list --device cuda | tail -n +2)
fi
wait
# A server counts the device's memory while it captures its decode steps: nothing else may begin on it meanwhile.
jobs=1
check goldens python3 "$root/tests/cuda/goldens_cuda.py" --binary "$tessera" "${whole[@]}"
check "batch invariance" python3 "$root/tests/cuda/batch_invariance.py" --binary "$tessera" "${some[@]}"
check "NaN rows" python3 "$root/tests/cuda/nan_rows.py" --binary "$tessera"
if python3 -c 'import openai, pytest' 2>/dev/null; then
    check "openai client" env TESSERA_BINARY="$tessera" TESSERA_DEVICE=cuda \
        python3 -m pytest -q "$root/tests/e2e/test_openai_client.py"
else
    echo "skip  openai client: the packages openai and pytest are not installed" >"$logs/skip.result"
fi
cat "$logs"/*.result
! grep -q '^FAIL' "$logs"/*.result
