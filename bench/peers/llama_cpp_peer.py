#!/usr/bin/env python3
"""Times llama.cpp (PyPI: llama-cpp-python, gguf, numpy) on a model folder, as `tessera bench engine` times Tessera.

The folder's weights are written to a GGUF of architecture hy_v3 (trunk only), once for each --dtype; the token ids of
the prompts and the counting of steps are those of `tessera bench engine`. Before timing, greedy output is compared
with a golden file. One JSON object a line, with the fields of `tessera bench engine --json`.

  python bench/peers/llama_cpp_peer.py models/demo --golden tests/golden/data/model.json
"""

import argparse
import ctypes
import json
import os
import resource
import sys
import time
from pathlib import Path

try:
    import gguf
    import llama_cpp
    import numpy as np
except ImportError as error:
    sys.exit(f"bench/peers/llama_cpp_peer.py: {error}: bench/engine_vs_llama.sh installs what it needs")

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


class Random:
    """The generator of Tessera's test data (splitmix64), so that both engines see the same prompts."""

    def __init__(self, seed):
        self.state = (seed * GOLDEN + 1) & MASK

    def below(self, limit):
        self.state = (self.state + GOLDEN) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return (z ^ (z >> 31)) % limit


class Checkpoint:
    """Tensors of a folder's safetensors files, by name: (dtype, shape, raw bytes)."""

    def __init__(self, folder):
        self.tensors = {}
        for path in sorted(folder.glob("*.safetensors")):
            data = np.memmap(path, dtype=np.uint8, mode="r")
            size = int(data[:8].view("<u8")[0])
            header = json.loads(bytes(data[8 : 8 + size]))
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = (8 + size + offset for offset in entry["data_offsets"])
                    self.tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])

    def float32(self, name):
        dtype, shape, raw = self.tensors[name]
        if dtype == "BF16":
            bits = np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16
            return bits.view(np.float32).reshape(shape)
        if dtype == "F32":
            return np.frombuffer(raw, dtype="<f4").reshape(shape)
        raise SystemExit(f"{name}: this script reads BF16 and F32 tensors, not {dtype}")


def tensor_map(config):
    """(GGUF name, [checkpoint names]) of the trunk; several names are stacked (experts)."""
    yield "token_embd.weight", ["model.embed_tokens.weight"]
    yield "output_norm.weight", ["model.norm.weight"]
    yield "output.weight", ["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        ours = f"model.layers.{layer}."
        theirs = f"blk.{layer}."
        yield theirs + "attn_norm.weight", [ours + "input_layernorm.weight"]
        yield theirs + "ffn_norm.weight", [ours + "post_attention_layernorm.weight"]
        for part in "qkv":
            yield theirs + f"attn_{part}.weight", [ours + f"self_attn.{part}_proj.weight"]
        yield theirs + "attn_output.weight", [ours + "self_attn.o_proj.weight"]
        for part in "qk":
            yield theirs + f"attn_{part}_norm.weight", [ours + f"self_attn.{part}_norm.weight"]
        mlp = ours + "mlp."
        if layer < config["first_k_dense_replace"]:
            for part in ("gate", "up", "down"):
                yield theirs + f"ffn_{part}.weight", [mlp + f"{part}_proj.weight"]
            continue
        yield theirs + "ffn_gate_inp.weight", [mlp + "router.gate.weight"]
        yield theirs + "exp_probs_b", [mlp + "expert_bias"]
        for part in ("gate", "up", "down"):
            experts = [mlp + f"experts.{e}.{part}_proj.weight" for e in range(config["num_experts"])]
            yield theirs + f"ffn_{part}_exps.weight", experts
            yield theirs + f"ffn_{part}_shexp.weight", [mlp + f"shared_mlp.{part}_proj.weight"]


def convert(folder, dtype, path):
    config = json.loads((folder / "config.json").read_text())
    checkpoint = Checkpoint(folder)
    writer = gguf.GGUFWriter(path, "hy_v3")
    writer.add_name("model")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
    writer.add_expert_weights_norm(config["route_norm"])
    writer.add_expert_weights_scale(float(config["router_scaling_factor"]))
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")  # token ids go in and come out
    for name, sources in tensor_map(config):
        values = [checkpoint.float32(source) for source in sources]
        array = np.ascontiguousarray(np.stack(values) if len(values) > 1 else values[0])
        small = array.ndim == 1 or name.endswith("ffn_gate_inp.weight")  # llama.cpp keeps these in float32
        if dtype == "f32" or small:
            writer.add_tensor(name, array)
        else:  # the checkpoint's values have zero low halves: nothing is rounded
            halves = (array.view(np.uint32) >> 16).astype(np.uint16)
            writer.add_tensor(name, halves.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


class Engine:
    """A llama.cpp context for `sequences` sequences of up to `length` tokens."""

    def __init__(self, model, sequences, length, arguments):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * ((length + 255) // 256 * 256)
        params.n_batch = max(2048, arguments.prompt_tokens)
        params.n_ubatch = 512
        params.n_seq_max = sequences
        params.n_threads = arguments.threads
        params.n_threads_batch = arguments.threads
        if arguments.kv == "f32":
            params.type_k = llama_cpp.GGML_TYPE_F32
            params.type_v = llama_cpp.GGML_TYPE_F32
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise SystemExit("llama.cpp made no context")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def close(self):
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)

    def clear(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def forget_from(self, position):
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_seq_rm(memory, -1, position, -1)

    def run(self, entries):
        """entries: (token, position, sequence, wants logits). Returns the greedy tokens of those that want logits."""
        self.batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = wanted
        if llama_cpp.llama_decode(self.context, self.batch) != 0:
            raise SystemExit("llama_decode failed")
        return [self.greedy(i) for i, entry in enumerate(entries) if entry[3]]

    def greedy(self, i):
        logits = llama_cpp.llama_get_logits_ith(self.context, i)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())

    def prefill(self, ids, sequence):
        last = len(ids) - 1
        return self.run([(token, i, sequence, i == last) for i, token in enumerate(ids)])[0]


def check_golden(model, path, arguments):
    """Greedy ids of every case that has some; returns (equal cases, cases)."""
    equal = 0
    cases = [case for case in json.loads(Path(path).read_text())["cases"] if case.get("greedy_ids")]
    for case in cases:
        engine = Engine(model, 1, len(case["prompt_ids"]) + len(case["greedy_ids"]), arguments)
        token = engine.prefill(case["prompt_ids"], 0)
        ids = [token]
        while len(ids) < len(case["greedy_ids"]):
            token = engine.run([(token, len(case["prompt_ids"]) + len(ids) - 1, 0, True)])[0]
            ids.append(token)
        engine.close()
        if ids == case["greedy_ids"]:
            equal += 1
        else:
            place = next(i for i, (a, b) in enumerate(zip(ids, case["greedy_ids"])) if a != b)
            print(f"golden {case['name']}: token {place} is {ids[place]}, not {case['greedy_ids'][place]}", file=sys.stderr)
    return equal, len(cases)


def time_prefill(model, prompts, arguments):
    engine = Engine(model, 1, arguments.prompt_tokens + 1, arguments)
    best = float("inf")
    for _ in range(arguments.rounds):
        engine.clear()
        start = time.perf_counter()
        engine.prefill(prompts[0][: arguments.prompt_tokens], 0)
        best = min(best, time.perf_counter() - start)
    engine.close()
    return best * 1e6


def time_decode(model, prompts, batch, arguments):
    begin = max(1, arguments.context - arguments.steps // 2)
    engine = Engine(model, batch, begin + arguments.steps + 1, arguments)
    for sequence in range(batch):
        engine.prefill(prompts[sequence][:begin], sequence)
    best = float("inf")
    for _ in range(arguments.rounds):
        engine.forget_from(begin)
        tokens = [prompts[sequence][begin] for sequence in range(batch)]
        times = []
        for step in range(arguments.steps):
            start = time.perf_counter()
            tokens = engine.run([(token, begin + step, i, True) for i, token in enumerate(tokens)])
            times.append(time.perf_counter() - start)
        best = min(best, sorted(times)[len(times) // 2])
    engine.close()
    return best * 1e6


def model_folder(text):
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such model folder")
    return Path(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=model_folder)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="bf16,f32", help="of the weights: bf16, f32 or both")
    parser.add_argument("--kv", default="f16", choices=["f16", "f32"], help="KV cache (f16 is llama.cpp's default)")
    parser.add_argument("--golden", help="model.json: greedy output is compared first")
    parser.add_argument("--work", type=Path, default=Path("build/peers_work"), help="where the GGUF files go")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    # Errors only: level 4 in llama.cpp's enumeration.
    def show(level, text, _):
        if level == 4:
            sys.stderr.write(text.decode())

    on_log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(show)
    llama_cpp.llama_log_set(on_log, None)
    llama_cpp.llama_backend_init()
    batches = [int(b) for b in arguments.batch.split(",")]
    length = max(arguments.prompt_tokens, arguments.context + arguments.steps) + 1

    for dtype in arguments.dtype.split(","):
        path = arguments.work / f"{arguments.model.resolve().name}-{dtype}.gguf"
        config = convert(arguments.model, dtype, path)
        limit = config["vocab_size"] - config["vocab_size"] // 16
        prompts = []
        for sequence in range(max(batches)):
            random = Random(sequence + 1)
            prompts.append([random.below(limit) for _ in range(length)])
        start = time.perf_counter()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        ready_s = time.perf_counter() - start
        if not model:
            raise SystemExit(f"llama.cpp {llama_cpp.__version__} does not load {path}")
        if arguments.golden:
            equal, cases = check_golden(model, arguments.golden, arguments)
            print(f"llama.cpp {dtype}: greedy output equals the reference in {equal} of {cases} cases", file=sys.stderr)

        def line(batch, step_us, prefill):
            print(
                json.dumps(
                    {
                        "device": "cpu",
                        "dtype": f"{dtype} weights, {arguments.kv} KV",
                        "batch": batch,
                        "prompt_tokens": arguments.prompt_tokens if prefill else 0,
                        "context": 0 if prefill else arguments.context,
                        "prefill_tokens_per_s": round(arguments.prompt_tokens / step_us * 1e6, 1) if prefill else None,
                        "decode_tokens_per_s": None if prefill else round(batch / step_us * 1e6, 1),
                        "step_us": round(step_us, 1),
                        "floor_us": None,
                        "ready_s": round(ready_s, 3),
                        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                        "engine": f"llama.cpp (llama-cpp-python {llama_cpp.__version__})",
                        "threads": arguments.threads,
                    }
                ),
                flush=True,
            )

        line(1, time_prefill(model, prompts, arguments), True)
        for batch in batches:
            line(batch, time_decode(model, prompts, batch, arguments), False)
        llama_cpp.llama_model_free(model)


if __name__ == "__main__":
    main()
