"""torch.compile: the small operators, written as a user of torch would."""

import torch

from cuda_peer import BF16, FP8, random

MAX_FP8 = 448.0
torch._dynamo.config.recompile_limit = 64  # of one function: it is compiled for each shape


def peers(case):
    builders = {"embed": embed, "rms_norm": rms_norm, "quantize": quantize, "swiglu": swiglu, "qkv_post": qkv_post,
                "router_topk": router_topk, "sample": sample}
    theirs = {"rms_norm": "scales" not in case.words,  # what the functions below do not compute
              "qkv_post": not {"hadamard", "q8", "scales", "last"} & set(case.words),
              "sample": case.op == "sample" and sample_kind(case)}
    if case.op in builders and theirs.get(case.op, True):
        yield "torch.compile", lambda: builders[case.op](case)


def compiled(function):
    # The outer function's code is the key: one compilation for each operator and shape.
    return torch.compile(function, dynamic=False, fullgraph=True)


def to_fp8(x, scale):
    return (x.float() / scale).clamp(-MAX_FP8, MAX_FP8).to(FP8)


@torch.no_grad()
def _embed(table, tokens):
    return torch.nn.functional.embedding(tokens, table)


def embed(case):
    table = random(30000, case.n["width"])
    tokens = torch.randint(30000, (case.n["rows"],), device="cuda", dtype=torch.int32)
    call = compiled(_embed)
    return lambda: call(table, tokens)


def _rms_norm(x, add, weight, kind):
    if add is not None:
        x.add_(add)
    wide = x.float()
    y = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(BF16)
    fp8 = to_fp8(y, 0.013) if "fp8" in kind else None
    return (y, fp8) if fp8 is None or "both" in kind else fp8


def rms_norm(case):
    x, add, weight = (random(*shape) for shape in [(case.n["rows"], case.n["width"])] * 2 + [(case.n["width"],)])
    call, kind = compiled(_rms_norm), ("fp8" if case.fp8 else "") + ("both" if "and" in case.words else "")
    add = add if "add" in case.words else None
    return lambda: call(x, add, weight, kind)


def quantize(case):
    x = random(case.n["rows"], case.n["width"])
    call = compiled(to_fp8)
    return lambda: call(x, 0.0173)


def _swiglu(x, width, fp8):
    y = torch.nn.functional.silu(x[:, :width]) * x[:, width:]
    return to_fp8(y, 0.021) if fp8 else y


def swiglu(case):
    x, width = random(case.n["rows"], 2 * case.n["width"]), case.n["width"]
    call, fp8 = compiled(_swiglu), case.fp8
    return lambda: call(x, width, fp8)


def _head_norm(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(BF16)


def _rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(BF16)


def _qkv_post(qkv, weights, rope, places, pages, heads):
    q_heads, kv_heads, fp8 = heads
    q, k, v = qkv.view(qkv.shape[0], -1, 128).split([q_heads, kv_heads, kv_heads], 1)
    cos, sin = rope
    q = _rotate(_head_norm(q, weights[0]), cos, sin)
    k = _rotate(_head_norm(k, weights[1]), cos, sin)
    if fp8:
        k, v = to_fp8(k, 0.05).view(torch.uint8), to_fp8(v, 0.02).view(torch.uint8)
    pages[0].index_put_(places, k)
    pages[1].index_put_(places, v)
    return q


def qkv_post(case):
    tokens, q_heads, kv_heads = case.n["tokens"], case.n["q_heads"], case.n["kv_heads"]
    qkv = random(tokens, (q_heads + 2 * kv_heads) * 128)
    weights = [random(128), random(128)]
    rope = [torch.rand(tokens, 1, 64, device="cuda") for _ in range(2)]
    slots = torch.randperm(tokens + 64, device="cuda")[:tokens]
    places = (slots // 64, slots % 64)
    shape = (tokens // 64 + 2, 64, kv_heads, 128)
    pages = [torch.zeros(shape, device="cuda", dtype=torch.uint8 if case.fp8 else BF16) for _ in range(2)]
    call, heads = compiled(_qkv_post), (q_heads, kv_heads, case.fp8)
    return lambda: call(qkv, weights, rope, places, pages, heads)


def _router_topk(logits, bias, k):
    scores = torch.sigmoid(logits)
    chosen = torch.topk(scores + bias, k, sorted=False).indices
    weights = scores.gather(1, chosen)
    return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.826


def router_topk(case):
    logits = torch.randn(case.n["tokens"], case.n["experts"], device="cuda")
    bias, k = torch.randn(case.n["experts"], device="cuda") * 0.1, case.n["k"]
    call = compiled(_router_topk)
    return lambda: call(logits, bias, k)


def sample_kind(case):
    return next((word for word in ("temperature", "penalties", "top_k=50") if word in case.words),
                "greedy" if case.words[-1] == "greedy" else None)


def history(case):
    """Which tokens a row's prompt had, and how often each was made: fifty tokens of either."""
    rows, vocab = case.n["rows"], case.n["vocab"]
    places = torch.randint(vocab, (2, rows, 50), device="cuda")
    seen = torch.zeros(rows, vocab, device="cuda", dtype=torch.bool).scatter_(1, places[0], True)
    counts = torch.zeros(rows, vocab, device="cuda", dtype=torch.int32)
    return seen, counts.scatter_add_(1, places[1], torch.ones_like(places[1], dtype=torch.int32))


def penalise(logits, seen, counts):
    made = counts > 0
    logits = torch.where(seen | made, torch.where(logits > 0, logits / 1.1, logits * 1.1), logits)
    return (logits - 0.1 * counts - 0.2 * made) / 0.8


def _sample(logits, kind, seen, counts):
    if kind == "penalties":
        logits = penalise(logits, seen, counts)
    if kind == "greedy":
        return logits.argmax(-1)
    if kind == "temperature":
        noise = torch.empty_like(logits).exponential_()
        return (torch.softmax(logits / 0.9, -1) / noise).argmax(-1)
    values, ids = torch.topk(logits if kind == "penalties" else logits / 0.9, 50)
    probs = torch.softmax(values, -1)
    probs = torch.where(probs.cumsum(-1) - probs < (0.9 if kind == "penalties" else 0.95), probs, 0.0)
    best = (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
    return ids.gather(1, best)


def sample(case):
    logits, kind = torch.rand(case.n["rows"], case.n["vocab"], device="cuda") * 24 - 12, sample_kind(case)
    seen, counts = history(case) if kind == "penalties" else (None, None)
    call = compiled(_sample)
    return lambda: call(logits, kind, seen, counts)
