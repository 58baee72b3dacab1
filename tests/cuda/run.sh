#!/usr/bin/env bash
# Every check that needs a CUDA device, one after the other; exit status 1 when one fails.
#   tests/cuda/run.sh [DIR] [--quick]
# DIR holds tessera and the cuda_*_test programs somewhere below it: build/cuda, or where they were copied to. --quick leaves
# out what takes over a minute: the recall sets, the FP8 copy, batch invariance beyond the first runs. NumPy is needed;
# where the Python package openai is missing, the client's tests are skipped with a word.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dir=$root/build/cuda
quick=
for argument in "$@"; do
    case $argument in
    --quick) quick=1 ;;
    -*)
        echo "tests/cuda/run.sh: unknown flag $argument (known: --quick)" >&2
        exit 2
        ;;
    *) dir=$(cd "$argument" && pwd) || exit 2 ;;
    esac
done
tessera=$(find "$dir" -maxdepth 2 -name tessera -type f -perm -u+x | head -1)
if [ -z "$tessera" ]; then
    echo "tests/cuda/run.sh: no program tessera in $dir: build it with PRESET=cuda make build" >&2
    exit 2
fi

results=()
failed=0
check() { # NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    echo "== $name"
    if "$@"; then
        results+=("ok    $name ($((SECONDS - start)) s)")
    else
        results+=("FAIL  $name ($((SECONDS - start)) s)")
        failed=1
    fi
}

while read -r program; do
    # The registry's cases follow as `ops test`.
    check "$(basename "$program")" "$program" --gtest_brief=1 '--gtest_filter=-Registry/*'
done < <(find "$dir" -name 'cuda_*_test' -type f -perm -u+x | sort)
check "ops test" "$tessera" ops test --device cuda
whole=(--fp8 --recall)
some=()
if [ -n "$quick" ]; then
    whole=()
    some=(--runs "16 at")
fi
check goldens python3 "$root/tests/cuda/goldens_cuda.py" --binary "$tessera" "${whole[@]}"
check "batch invariance" python3 "$root/tests/cuda/batch_invariance.py" --binary "$tessera" "${some[@]}"
check "NaN rows" python3 "$root/tests/cuda/nan_rows.py" --binary "$tessera"
if python3 -c 'import openai, pytest' 2>/dev/null; then
    check "openai client" env TESSERA_BINARY="$tessera" TESSERA_DEVICE=cuda \
        python3 -m pytest -q "$root/tests/e2e/test_openai_client.py"
else
    results+=("skip  openai client: the packages openai and pytest are not installed")
fi
printf '%s\n' "${results[@]}"
exit $failed
