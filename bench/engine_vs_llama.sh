#!/bin/sh
# Times Tessera and llama.cpp on the same model folder in one run, and prints both beside each other.
#   bench/engine_vs_llama.sh [MODEL] [TESSERA_BINARY]
# llama.cpp comes from PyPI (bench/peers/requirements.txt) and is built for this processor on the first run, about 15
# minutes of two cores; PEER_VENV names another virtual environment that already has it. Results as JSON lines in
# build/engine_vs_llama.jsonl.
set -eu
cd "$(dirname "$0")/.."
model=${1:-models/demo}
tessera=${2:-build/release/tessera}
venv=${PEER_VENV:-build/peers}
if [ ! -f "$model/config.json" ]; then
    echo "bench/engine_vs_llama.sh: $model is no model folder: it has no config.json" >&2
    exit 2
fi
if ! command -v "$tessera" >/dev/null; then
    echo "bench/engine_vs_llama.sh: $tessera is no program: build it with make build" >&2
    exit 2
fi
mkdir -p build
out=$(mktemp build/engine_vs_llama.XXXXXX)
if ! "$venv/bin/python" -c 'import llama_cpp' 2>/dev/null; then
    python3 -m venv "$venv"
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF" \
        "$venv/bin/pip" install --no-binary llama-cpp-python -r bench/peers/requirements.txt
fi
"$tessera" bench engine "$model" --json >"$out"
golden=
case $model in */demo | demo) golden="--golden tests/golden/data/model.json" ;; esac
# shellcheck disable=SC2086 # two words on purpose
"$venv/bin/python" bench/peers/llama_cpp_peer.py "$model" $golden --work build/peers_work >>"$out"
mv "$out" build/engine_vs_llama.jsonl
"$venv/bin/python" bench/peers/side_by_side.py build/engine_vs_llama.jsonl
