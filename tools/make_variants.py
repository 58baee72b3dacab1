#!/usr/bin/env python3
"""Makes variants of a model folder: the same weights in other layouts, element types and quantised forms.

The source is a folder in the published ("inner") layout with bfloat16 weights, such as models/demo. Each variant
becomes a folder of its own with the source's other files beside the weights, so that it can be served as it is.
"""

import argparse
import json
import pathlib
import re
import shutil
import struct
import sys

import numpy as np

VARIANTS = ("outer", "float16", "float32", "single", "fp8", "fp8_dynamic", "fp8_block")
UNQUANTISED = ["lm_head", "model.embed_tokens"]
QUANTISED = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$")
E4M3_MAX = 448.0
BLOCK = 128  # rows and columns that share a scale in fp8_block
NUMPY_TYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F8_E4M3": np.uint8}

EPILOG = """\
variants:
  outer        transformers' names, experts fused
  float16      all weights float16 (the expert bias stays float32)
  float32      all weights float32
  single       one model.safetensors without an index
  fp8          per-tensor e4m3 projections with weight_scale = amax / 448, static input_scale, KV scales in
               kv_cache_scales.safetensors
  fp8_dynamic  the same weights without scales of activations or KV
  fp8_block    e4m3 projections with a weight_scale_inv = amax / 448 for each block of 128 x 128

The largest activations for fp8's input_scale (= maximum / 448) come from --maxima, a JSON object from module names
without ".weight" ("model.layers.0.self_attn.q_proj") to numbers; modules not in it take --input-max. The same file may
give "model.layers.L.self_attn.k" and ".v" for the KV scales; the default is --kv-max.

examples:
  tools/make_variants.py models/demo build/variants
  tools/make_variants.py models/demo build/variants --only fp8 --maxima maxima.json
"""


class Tensor:
    """dtype as safetensors spells it; values = a numpy array of NUMPY_TYPES[dtype] (bfloat16 and e4m3 as raw bits)."""

    def __init__(self, dtype, values):
        self.dtype = dtype
        self.values = values

    def as_float32(self):
        if self.dtype == "BF16":
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        return self.values.astype(np.float32)


def read_safetensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[8 + length + begin : 8 + length + end], NUMPY_TYPES[entry["dtype"]])
        tensors[name] = Tensor(entry["dtype"], values.reshape(entry["shape"]))
    return tensors


def write_safetensors(path, tensors):
    header = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.values.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.values.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)))
        out.write(text)
        for tensor in tensors.values():
            out.write(np.ascontiguousarray(tensor.values).tobytes())


def read_folder(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(read_safetensors(path))
    if not tensors:
        sys.exit(f"{folder}: no *.safetensors files")
    return tensors


def write_folder(source, target, tensors, config, shards=2):
    """The source's small files, `config`, and the tensors in `shards` files (one: without an index)."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith("model.safetensors") and path.suffix != ".safetensors":
            shutil.copy(path, target / path.name)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if shards == 1:
        write_safetensors(target / "model.safetensors", tensors)
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        write_safetensors(target / file, part)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(t.values.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def outer_layout(tensors, experts):
    outer = {}
    for name, tensor in tensors.items():
        found = re.match(r"(.*\.mlp\.experts\.)0\.gate_proj\.weight$", name)
        if found:
            prefix = found[1]
            part = lambda e, kind: tensors[f"{prefix}{e}.{kind}_proj.weight"].values
            gate_up = [np.concatenate([part(e, "gate"), part(e, "up")]) for e in range(experts)]
            outer[prefix + "gate_up_proj"] = Tensor(tensor.dtype, np.stack(gate_up))
            outer[prefix + "down_proj"] = Tensor(tensor.dtype, np.stack([part(e, "down") for e in range(experts)]))
        elif ".mlp.experts." not in name:
            renamed = name.replace(".mlp.router.gate.", ".mlp.gate.").replace(".mlp.shared_mlp.", ".mlp.shared_experts.")
            outer[renamed.replace(".mlp.expert_bias", ".mlp.e_score_correction_bias")] = tensor
    return outer


def converted(tensors, dtype):
    kind = NUMPY_TYPES[dtype]
    return {
        name: tensor if name.endswith("expert_bias") else Tensor(dtype, tensor.as_float32().astype(kind))
        for name, tensor in tensors.items()
    }


def e4m3_table():
    """The value of each of the 256 codes; the two NaN codes hold NaN."""
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    size[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -size, size)


def to_e4m3(values):
    """Codes of the nearest e4m3 values, ties to the even code, beyond 448 the largest."""
    grid = e4m3_table()[:127]
    size = np.minimum(np.abs(values.astype(np.float64)), E4M3_MAX)
    upper = np.clip(np.searchsorted(grid, size), 1, 126)
    lower = upper - 1
    below, above = size - grid[lower], grid[upper] - size
    pick_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    codes = np.where(pick_upper, upper, lower).astype(np.uint8)
    return codes | (np.signbit(values).astype(np.uint8) << 7)


def scalar(value):
    return Tensor("F32", np.array([value], np.float32))


def e4m3_scales(largest):
    return (np.maximum(largest, 1e-12) / E4M3_MAX).astype(np.float32)


def fp8_dynamic_form(tensors):
    packed = {}
    for name, tensor in tensors.items():
        packed[name] = tensor
        if QUANTISED.search(name):
            values = tensor.as_float32()
            scale = e4m3_scales(np.abs(values).max())
            packed[name] = Tensor("F8_E4M3", to_e4m3(values / scale))
            packed[name + "_scale"] = scalar(scale)
    return packed


def fp8_block_form(tensors):
    packed = {}
    for name, tensor in tensors.items():
        packed[name] = tensor
        if QUANTISED.search(name):
            values = tensor.as_float32()
            rows, cols = values.shape
            padded = np.pad(np.abs(values), ((0, -rows % BLOCK), (0, -cols % BLOCK)))
            blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
            scales = e4m3_scales(blocks.max(axis=(1, 3)))
            spread = scales.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)[:rows, :cols]
            packed[name] = Tensor("F8_E4M3", to_e4m3(values / spread))
            packed[name + "_scale_inv"] = Tensor("F32", scales)
    return packed


def fp8_static_form(tensors, args):
    """fp8_dynamic_form(), and scales of activations; the second result are those of K and V."""
    maxima = json.loads(args.maxima.read_text()) if args.maxima else {}
    packed, kv_scales = fp8_dynamic_form(tensors), {}
    for name in filter(QUANTISED.search, tensors):
        module = name.removesuffix(".weight")
        packed[module + ".input_scale"] = scalar(maxima.get(module, args.input_max) / E4M3_MAX)
        found = re.match(r"(.*\.self_attn\.)([kv])_proj\.weight$", name)
        if found:
            limit = maxima.get(found[1] + found[2], args.kv_max)
            kv_scales[f"{found[1]}{found[2]}_cache.scale"] = scalar(limit / E4M3_MAX)
    return packed, kv_scales


def make(name, source, target, tensors, config, args):
    if name == "outer":
        write_folder(source, target, outer_layout(tensors, config["num_experts"]), config)
    elif name == "float16":
        write_folder(source, target, converted(tensors, "F16"), config | {"dtype": "float16"})
    elif name == "float32":
        write_folder(source, target, converted(tensors, "F32"), config | {"dtype": "float32"})
    elif name == "single":
        write_folder(source, target, tensors, config, shards=1)
    elif name == "fp8_dynamic":
        section = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": UNQUANTISED}
        write_folder(source, target, fp8_dynamic_form(tensors), config | {"quantization_config": section})
    elif name == "fp8_block":
        section = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": UNQUANTISED,
        }
        write_folder(source, target, fp8_block_form(tensors), config | {"quantization_config": section})
    else:
        packed, kv_scales = fp8_static_form(tensors, args)
        section = {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": UNQUANTISED,
            "kv_cache_scheme": "static",
        }
        write_folder(source, target, packed, config | {"quantization_config": section})
        write_safetensors(target / "kv_cache_scales.safetensors", kv_scales)


def main():
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path, help="model folder in the published layout, bfloat16")
    parser.add_argument("target", type=pathlib.Path, help="folder that gets one subfolder a variant")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=VARIANTS, help="variants to make (all)")
    parser.add_argument("--input-max", type=float, default=32.0, help="largest activation of any linear (32)")
    parser.add_argument("--kv-max", type=float, default=32.0, help="largest key or value (32)")
    parser.add_argument("--maxima", type=pathlib.Path, help="JSON file of largest activations")
    args = parser.parse_args()
    tensors = read_folder(args.source)
    config = json.loads((args.source / "config.json").read_text())
    for name in args.only:
        make(name, args.source, args.target / name, tensors, config, args)
        print(args.target / name)


if __name__ == "__main__":
    main()
