# shellcheck shell=bash disable=SC2154  # $root comes from the script that sources this
# Shared by ./run, ./test, .ci/run and the Makefile (sourced, not run): timed phases and the packages they need.

log_dir="$root/build/log"
# The presets compile the same files; ccache shares them if the build directory is not part of the key.
export CCACHE_NOHASHDIR=1

# phase NAME COMMAND...: runs it with its output in build/log/NAME.log and prints how long it took; when it fails, its
# last lines too. VERBOSE=1 shows all output. Bash ignores `set -e` inside a command whose status is looked at, so the
# functions given to phase() join their steps with &&.
phase() {
    local name="$1" log="$log_dir/$1.log" start=$SECONDS status=0
    shift
    mkdir -p "$log_dir"
    if [ "${VERBOSE:-0}" = 1 ]; then
        "$@" 2>&1 | tee "$log" >&2 || status=$?
    else
        "$@" >"$log" 2>&1 </dev/null || status=$?
    fi
    if [ "$status" -ne 0 ]; then
        printf '%-12s FAILED after %d s (exit status %d); the end of %s:\n' \
            "$name" $((SECONDS - start)) "$status" "${log#"$root"/}" >&2
        tail -n "${FAIL_LINES:-60}" "$log" >&2
        return "$status"
    fi
    printf '%-12s %4d s\n' "$name" $((SECONDS - start)) >&2
}

# The packages named in the given lists that are not installed.
missing_packages() {
    local wanted installed
    wanted=$(cat "$@" | sed 's/#.*//' | tr -s '[:space:]' '\n' | sed '/^$/d' | sort -u)
    # shellcheck disable=SC2086  # one word a package
    installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' $wanted 2>/dev/null |
        sed -n 's/^installed //p' | sort -u || true)
    comm -23 <(printf '%s\n' "$wanted") <(printf '%s\n' "$installed")
}

apt_install() {
    local sudo=()
    [ "$(id -u)" = 0 ] || sudo=(sudo -n)
    "${sudo[@]}" apt-get update -qq &&
        "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# ensure_packages LIST...: installs what is missing, or says what to run when it may not.
ensure_packages() {
    local missing
    if ! command -v dpkg-query >/dev/null; then
        echo "This script installs Debian 12 packages; elsewhere install the equivalents of: $*" >&2
        echo "and build with: cmake --preset release && cmake --build --preset release --target tessera" >&2
        return 1
    fi
    missing=$(missing_packages "$@")
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
        echo "Some packages are missing and installing them needs root. Run this, then start again:" >&2
        echo "    sudo apt-get update && sudo apt-get install --no-install-recommends" $missing >&2
        return 1
    fi
    # shellcheck disable=SC2086
    phase setup apt_install $missing
}

# ensure_venv: the virtual environment of the Python tests, made again when its pinned requirements change.
ensure_venv() {
    local requirements="$root/tests/e2e/requirements.txt" stamp="$root/.venv/requirements.stamp"
    [ -f "$requirements" ] || return 0
    cmp -s "$requirements" "$stamp" && return 0
    phase venv make_venv "$requirements" "$stamp"
}

make_venv() {
    python3 -m venv --clear "$root/.venv" &&
        "$root/.venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$1" &&
        cp "$1" "$2"
}

# configure PRESET [ARGUMENTS...]: CMake, when the build directory is new (Ninja runs CMake again by itself when a
# CMake file or the list of sources changes).
configure() {
    [ -f "$root/build/$1/build.ninja" ] || cmake --preset "$@"
}
