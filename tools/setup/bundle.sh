#!/usr/bin/env bash
# Makes dist/tessera-VERSION-x86_64/ and its .tar.zst (or .tar.xz): the stripped binary and, in lib/, every shared library
# it needs except glibc's own, found by $ORIGIN. Arguments name model folders to include.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
# shellcheck source=tools/setup/common.sh
source tools/setup/common.sh

build() {
    configure release &&
        cmake --build build/release --target tessera
}

# The libraries that the loader found, without glibc's, which must be the other machine's own.
libraries() {
    env -u LD_LIBRARY_PATH ldd "$1" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' |
        grep -vE '/(ld-linux[^/]*|lib(c|m|mvec|dl|rt|pthread|resolv|util|nsl|anl|BrokenLocale))\.so[^/]*$'
}

ensure_packages tools/setup/packages-serve.txt
phase build build
binary=build/release/tessera
name="tessera-$("$binary" --version | awk '{print $2}')-$(uname -m)"
out="dist/$name"
rm -rf "$out" "$out".tar.*
mkdir -p "$out/lib"
strip -o "$out/tessera" "$binary"
libraries "$binary" | while read -r library; do
    cp -L "$library" "$out/lib/${library##*/}"
    strip --strip-unneeded "$out/lib/${library##*/}"
done
cp LICENSE "$out/"
for model in "$@"; do
    mkdir -p "$out/models"
    cp -rL "$model" "$out/models/"
done

# The bundle must work elsewhere: everything but glibc comes from lib/.
outside=$(libraries "$out/tessera" | grep -v "^$root/$out/lib/" || true)
if [ -n "$outside" ]; then
    printf 'error: not found through the bundle: %s\n' "$outside" >&2
    exit 1
fi
env -i "$out/tessera" --version >/dev/null

if command -v zstd >/dev/null; then
    tar --zstd -cf "$out.tar.zst" -C dist "$name"
else
    tar -cJf "$out.tar.xz" -C dist "$name"
fi
du -sh "$out" "$out".tar.* | sed 's/^/  /'
