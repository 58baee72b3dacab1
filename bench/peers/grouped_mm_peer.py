"""torch's grouped products with torch.compile between them, as a mixture of experts is written in torch: rows gathered by
expert, gate-up, SwiGLU, down, weighted sum. The sorting itself is left out of the time. The shared expert is one more
expert that every token chooses. And the two products alone, which are CUTLASS's."""

import torch

from compile_peer import MAX_FP8, compiled
from cuda_peer import BF16, FP8, PART, random


def peers(case):
    if case.op == "moe" and case.n.get("experts", 0) > 0 and not {"zipf", "hot"} & set(case.words):
        yield "torch grouped_mm, without sorting", lambda: moe(case)
        yield f"{PART}torch grouped_mm", lambda: moe(case, products_alone=True)


def to_fp8(x, scale):
    return (x.float() / scale).clamp(-MAX_FP8, MAX_FP8).to(FP8)


def _gather(x, tokens, fp8):
    return to_fp8(x[tokens], 0.011) if fp8 else x[tokens]


def _act(both, width, fp8):
    act = torch.nn.functional.silu(both[:, :width]) * both[:, width:]
    return to_fp8(act, 0.02) if fp8 else act


def _sum(out, places, shares, y):
    return y + (out[places].float() * shares[:, :, None]).sum(1).to(BF16)


def experts_of(count, columns, inputs, fp8):
    """[experts, inputs, columns], each transposed in memory; standard deviation 1 / sqrt(inputs) but for the scale."""
    weights = torch.stack([random(columns, inputs, dtype=FP8 if fp8 else BF16,
                                  deviation=1.0 if fp8 else inputs ** -0.5) for _ in range(count)])
    return weights.transpose(1, 2)


def moe(case, products_alone=False):
    n, fp8 = case.n, case.fp8
    tokens, hidden, width, shared = n["tokens"], n["hidden"], n["width"], int(n["shared"] > 0)
    experts = n["experts"] + shared
    chosen = torch.rand(tokens, n["experts"], device="cuda").topk(n["k"]).indices
    if shared:
        chosen = torch.cat([chosen, torch.full((tokens, 1), n["experts"], device="cuda")], 1)
    order = chosen.flatten().argsort()
    token_of = order // chosen.shape[1]
    places = order.argsort().view_as(chosen)
    ends = torch.bincount(chosen.flatten(), minlength=experts).cumsum(0).to(torch.int32)
    shares = torch.rand(chosen.shape, device="cuda")
    x, y = random(tokens, hidden), random(tokens, hidden)
    gate_up, down = experts_of(experts, 2 * width, hidden, fp8), experts_of(experts, hidden, width, fp8)
    gather, act, total = compiled(_gather), compiled(_act), compiled(_sum)

    def product(b, scale):
        if not fp8:
            return lambda a: torch._grouped_mm(a, b, ends)
        of_rows = torch.full((order.numel(),), scale ** 0.5, device="cuda")
        of_columns = torch.full((experts, b.shape[2]), scale ** 0.5, device="cuda")
        return lambda a: torch._scaled_grouped_mm(a, b, of_rows, of_columns, ends, out_dtype=BF16, use_fast_accum=True)

    first, second = product(gate_up, 0.011 * hidden ** -0.5), product(down, 0.02 * width ** -0.5)
    if products_alone:
        rows = gather(x, token_of, fp8)
        middle = act(first(rows), width, fp8)
        return lambda: (first(rows), second(middle))
    return lambda: total(second(act(first(gather(x, token_of, fp8)), width, fp8)), places, shares, y)
