"""Triton kernels as serving engines write them: add + RMSNorm, the router's choice, and a fused mixture of experts of
vLLM's kind (routes sorted by expert into blocks; gate-up, SwiGLU, down, sum). The sorting itself is left out of the
mixture's time. The shared expert is one more expert that every token chooses."""

import torch
import triton
import triton.language as tl

from cuda_peer import BF16, FP8, random


def peers(case):
    if case.op == "rms_norm" and "add" in case.words and "fp8" not in case.words:
        yield "Triton", lambda: add_rms_norm(case)
    if case.op == "router_topk":
        yield "Triton", lambda: router(case)
    if case.op == "moe" and case.n.get("experts", 0) > 0 and not {"zipf", "hot"} & set(case.words):
        yield "Triton fused MoE, without sorting", lambda: moe(case)


@triton.jit
def add_rms_norm_kernel(x, add, weight, y, width: tl.constexpr, block: tl.constexpr):
    at = tl.arange(0, block)
    inside = at < width
    row = tl.program_id(0) * width
    value = tl.load(x + row + at, inside, 0.0).to(tl.float32) + tl.load(add + row + at, inside, 0.0).to(tl.float32)
    value = value.to(tl.bfloat16)
    tl.store(x + row + at, value, inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + 1e-5)
    tl.store(y + row + at, (wide * scale).to(tl.bfloat16) * tl.load(weight + at, inside, 0.0), inside)


def add_rms_norm(case):
    rows, width = case.n["rows"], case.n["width"]
    x, add, y, weight = random(rows, width), random(rows, width), random(rows, width), random(width)
    block = triton.next_power_of_2(width)
    return lambda: add_rms_norm_kernel[(rows,)](x, add, weight, y, width, block, num_warps=8)


@triton.jit
def router_kernel(logits, bias, chosen, weights, experts: tl.constexpr, k: tl.constexpr, block: tl.constexpr):
    at = tl.arange(0, block)
    row = tl.program_id(0)
    score = tl.sigmoid(tl.load(logits + row * experts + at, at < experts, float("-inf")))
    rank = tl.where(at < experts, score + tl.load(bias + at, at < experts, 0.0), float("-inf"))
    total = 0.0
    picked = at < 0
    for i in tl.static_range(k):
        best = tl.argmax(rank, 0)
        total += tl.sum(tl.where(at == best, score, 0.0), 0)
        tl.store(chosen + row * k + i, best)
        picked = picked | (at == best)
        rank = tl.where(at == best, float("-inf"), rank)
    place = tl.cumsum(picked.to(tl.int32), 0) - 1
    tl.store(weights + row * k + place, score / (total + 1e-20) * 2.826, picked)


def router(case):
    tokens, experts, k = case.n["tokens"], case.n["experts"], case.n["k"]
    logits, bias = torch.randn(tokens, experts, device="cuda"), torch.randn(experts, device="cuda") * 0.1
    chosen = torch.empty(tokens, k, device="cuda", dtype=torch.int32)
    weights = torch.empty(tokens, k, device="cuda")
    block = triton.next_power_of_2(experts)
    return lambda: router_kernel[(tokens,)](logits, bias, chosen, weights, experts, k, block, num_warps=1)


@triton.jit
def grouped_gemm_kernel(x, weight, y, routes, block_experts, scales, shares, route_count, columns, inputs, top_k,
                        weighted: tl.constexpr, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr):
    """y[route] = x[route // top_k] W[expert]^T, bm routes of one expert a block; routes beyond the count are padding."""
    column_blocks = tl.cdiv(columns, bn)
    block = tl.program_id(0) // column_blocks
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    route = tl.load(routes + block * bm + tl.arange(0, bm))
    real = route < route_count
    n = (tl.program_id(0) % column_blocks) * bn + tl.arange(0, bn)
    k = tl.arange(0, bk)
    x_at = x + (route // top_k).to(tl.int64)[:, None] * inputs + k[None, :]
    w_at = weight + expert * columns * inputs + (n % columns).to(tl.int64)[None, :] * inputs + k[:, None]
    sums = tl.zeros((bm, bn), tl.float32)
    for first in range(0, inputs, bk):
        sums = tl.dot(tl.load(x_at, real[:, None] & (k[None, :] < inputs - first), 0.0),
                      tl.load(w_at, k[:, None] < inputs - first, 0.0), sums)
        x_at += bk
        w_at += bk
    sums *= tl.load(scales + expert)
    if weighted:
        sums *= tl.load(shares + route, real, 0.0)[:, None]
    out = y + route.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out, sums.to(tl.bfloat16), real[:, None] & (n[None, :] < columns))


@triton.jit
def swiglu_kernel(x, y, width, scale, fp8: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(x + row * 2 * width + at, at < width, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, at < width, 0.0).to(tl.float32)
    value = (gate * tl.sigmoid(gate) * up).to(tl.bfloat16)
    if fp8:
        value = tl.clamp(value.to(tl.float32) / scale, -448.0, 448.0).to(tl.float8e4nv)
    tl.store(y + row * width + at, value, at < width)


@triton.jit
def quantize_kernel(x, y, count, scale, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + at, at < count, 0.0).to(tl.float32) / scale
    tl.store(y + at, tl.clamp(value, -448.0, 448.0).to(tl.float8e4nv), at < count)


@triton.jit
def sum_kernel(x, y, width, top_k: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(y + row * width + at, at < width, 0.0).to(tl.float32)
    for i in tl.static_range(top_k):
        total += tl.load(x + (row * top_k + i) * width + at, at < width, 0.0).to(tl.float32)
    tl.store(y + row * width + at, total.to(tl.bfloat16), at < width)


def sort_routes(chosen, experts, bm):
    """Routes (token * top_k + place) of each expert in turn, each expert's padded to blocks of bm; the blocks' experts."""
    flat = chosen.flatten().cpu()
    routes, block_experts = [], []
    for expert in range(experts):
        mine = torch.nonzero(flat == expert).flatten().int()
        if len(mine):
            blocks = (len(mine) + bm - 1) // bm
            routes.append(torch.nn.functional.pad(mine, (0, blocks * bm - len(mine)), value=len(flat)))
            block_experts += [expert] * blocks
    return torch.cat(routes).to(chosen.device), torch.tensor(block_experts, dtype=torch.int32, device=chosen.device)


def choose_tiles(rows_an_expert, fp8):
    """(bm, bn, bk, warps, stages)"""
    if rows_an_expert <= 16:
        return 16, 128, 128 if fp8 else 64, 4, 4
    if rows_an_expert <= 64:
        return 64, 128, 128 if fp8 else 64, 4, 4
    return 128, 128, 128 if fp8 else 64, 8, 3


class FusedMoe:
    """The layer's data, and its call."""

    def __init__(self, n, fp8, device="cuda"):
        self.n, self.fp8 = n, fp8
        tokens, hidden, width = n["tokens"], n["hidden"], n["width"]
        shared = int(n["shared"] > 0)
        self.experts, self.top_k = n["experts"] + shared, n["k"] + shared
        dtype = FP8 if fp8 else BF16
        make = lambda *shape: torch.empty(shape, dtype=BF16, device=device).normal_(0, 1.0 if fp8 else hidden ** -0.5)  # noqa: E731
        self.gate_up = torch.stack([make(2 * width, hidden).to(dtype) for _ in range(self.experts)])
        self.down = torch.stack([make(hidden, width).to(dtype) for _ in range(self.experts)])
        self.x, self.y = (torch.empty(tokens, hidden, dtype=BF16, device=device).normal_() for _ in range(2))
        self.scales = torch.full((self.experts,), 1.0, device=device)
        self.gate_up_scale, self.down_scale = ((0.011 * hidden ** -0.5, 0.02 * hidden ** -0.5) if fp8 else (1.0, 1.0))
        self.gate_up_scales, self.down_scales = self.scales * self.gate_up_scale, self.scales * self.down_scale
        chosen = torch.rand(tokens, n["experts"], device=device).topk(n["k"]).indices
        if shared:
            chosen = torch.cat([chosen, torch.full((tokens, 1), n["experts"], device=device)], 1)
        self.chosen = chosen
        self.shares = torch.rand(tokens, self.top_k, device=device)
        self.tiles = choose_tiles(tokens * n["k"] / n["experts"], fp8)
        self.routes, self.block_experts = sort_routes(chosen, self.experts, self.tiles[0])
        rows = tokens * self.top_k
        self.x8 = torch.empty(tokens, hidden, dtype=dtype, device=device)
        self.both = torch.empty(rows, 2 * width, dtype=BF16, device=device)
        self.act = torch.empty(rows, width, dtype=dtype, device=device)
        self.out = torch.empty(rows, hidden, dtype=BF16, device=device)

    def gemm(self, x, weight, y, scales, top_k, weighted):
        bm, bn, bk, warps, stages = self.tiles
        columns, inputs = weight.shape[1:]
        grid = (len(self.block_experts) * triton.cdiv(columns, bn),)
        grouped_gemm_kernel[grid](x, weight, y, self.routes, self.block_experts, scales, self.shares,
                                  self.shares.numel(), columns, inputs, top_k, weighted, bm, bn, bk,
                                  num_warps=warps, num_stages=stages)

    def __call__(self):
        tokens, hidden, width = self.n["tokens"], self.n["hidden"], self.n["width"]
        x = self.x
        if self.fp8:
            x = self.x8
            quantize_kernel[(triton.cdiv(x.numel(), 2048),)](self.x, x, x.numel(), 0.011, 2048)
        self.gemm(x, self.gate_up, self.both, self.gate_up_scales, self.top_k, False)
        swiglu_kernel[(len(self.act), triton.cdiv(width, 1024))](self.both, self.act, width, 0.02, self.fp8, 1024)
        self.gemm(self.act, self.down, self.out, self.down_scales, 1, True)
        sum_kernel[(tokens, triton.cdiv(hidden, 1024))](self.out, self.y, hidden, self.top_k, 1024)


def moe(case):
    return FusedMoe(case.n, case.fp8)
