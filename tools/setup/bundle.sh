#!/usr/bin/env bash
# Makes dist/tessera-VERSION-x86_64/ and its .tar.zst (or .tar.xz): the stripped binary and, in lib/, every shared library
# it needs except glibc's own, found by $ORIGIN. Arguments name model folders to include. PRESET=cuda bundles the build
# with the CUDA backend, as ...-cuda; the driver and NVIDIA's libraries (cuBLASLt is 540 MB) are the other machine's own.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
# shellcheck source=tools/setup/common.sh
source tools/setup/common.sh

preset="${PRESET:-release}"
case "$preset" in
release | cuda) ;;
*)
    echo "error: PRESET is release or cuda, not $preset" >&2
    exit 1
    ;;
esac

build() {
    configure "$preset" &&
        cmake --build "build/$preset" --target tessera
}

# The libraries that the loader found, without those that must be the other machine's own: glibc's and NVIDIA's.
libraries() {
    env -u LD_LIBRARY_PATH ldd "$1" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' |
        grep -vE '/(ld-linux[^/]*|lib(c|m|mvec|dl|rt|pthread|resolv|util|nsl|anl|BrokenLocale))\.so[^/]*$' |
        grep -vE '/lib(cuda|cudart|cublas|cublasLt|nccl)\.so[^/]*$'
}

# Where a bundle with CUDA looks for cuBLASLt: RPATH first, so that an unrelated LD_LIBRARY_PATH changes nothing else.
cuda_readme() {
    cat <<'TEXT'
This build runs on one NVIDIA Hopper GPU (compute capability 9.0) with --device cuda. It needs a driver for CUDA 13 and
libcublasLt.so.13, which is not in the bundle. The loader looks for it in lib/ beside the binary (a link is enough), then
in /usr/local/cuda/lib, then in the directories of LD_LIBRARY_PATH. PyTorch's packages have it too:

    export LD_LIBRARY_PATH=$(python3 -c 'import nvidia.cu13 as m; print(m.__path__[0] + "/lib")')
    ./tessera ops test --device cuda --small
TEXT
}

ensure_packages tools/setup/packages-serve.txt
phase build build
binary="build/$preset/tessera"
name="tessera-$("$binary" --version | awk '{print $2}')-$(uname -m)"
[ "$preset" = release ] || name="$name-$preset"
out="dist/$name"
rm -rf "$out" "$out".tar.*
mkdir -p "$out/lib"
strip -o "$out/tessera" "$binary"
libraries "$binary" | while read -r library; do
    cp -L "$library" "$out/lib/${library##*/}"
    strip --strip-unneeded "$out/lib/${library##*/}"
done
cp LICENSE "$out/"
[ "$preset" != cuda ] || cuda_readme >"$out/README.txt"
for model in "$@"; do
    mkdir -p "$out/models"
    cp -rL "$model" "$out/models/"
done

# The bundle must work elsewhere: everything but glibc and NVIDIA's libraries comes from lib/.
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
