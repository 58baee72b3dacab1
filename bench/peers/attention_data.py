"""Inputs of an attention case: drawn by torch for timing, or the very numbers of `tessera ops bench`, for comparing errors
(src/ops/attention/cuda/attention_cuda_cases.h and src/ops/cuda/cuda_noise.h say how those come about)."""

import math

import torch

from cuda_peer import BF16, FP8, random, sets_for

PAGE, HEAD_DIM = 64, 128
K_SCALE = 0.7  # of the cases' e4m3 pages
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORD = (1 << 64) - 1


class AttentionData:
    """q, out [rows, query heads, 128]; k, v [pages, KV heads, 64, 128]; ids: the pages of all sequences, one after the other.
    scale: of a product of q and k as they lie there."""

    def __init__(self, case, q, k, v, ids):
        self.lengths, self.queries = shape(case)
        self.counts = page_counts(self.lengths)
        self.q, self.k, self.v, self.ids = q, k, v, ids
        self.out = torch.empty_like(q)
        self.scale = HEAD_DIM ** -0.5


def shape(case):
    """(slots of each sequence, queries of each)"""
    if case.op == "attention_decode":
        return case.lengths(), case.n.get("q_len", 1)
    return [int(case.words[0]) + int(case.words[2])], int(case.words[0])


def page_counts(lengths):
    return [(length + PAGE - 1) // PAGE for length in lengths]


def drawn(case):
    q_heads, kv_heads = case.heads()
    lengths, queries = shape(case)
    pages = sum(page_counts(lengths))
    k, v = random(2, pages, kv_heads, PAGE, HEAD_DIM, dtype=FP8 if case.fp8 else BF16)
    q = random(len(lengths) * queries, q_heads, HEAD_DIM)
    return AttentionData(case, q, k, v, torch.randperm(pages, dtype=torch.int32, device="cuda"))


class OpRandom:
    """As in src/ops/op_case.h."""

    def __init__(self, seed):
        self.state = (seed * GOLDEN + 1) & WORD

    def next(self):
        self.state = (self.state + GOLDEN) & WORD
        z = self.state
        z = ((z ^ (z >> 30)) * MIX1) & WORD
        z = ((z ^ (z >> 27)) * MIX2) & WORD
        return z ^ (z >> 31)


def signed(word):
    return word - (1 << 64) if word >> 63 else word


def noise(seed, first, count, deviation, dtype):
    """Elements first to first + count of the noise of a seed."""
    def shifted(z, bits):
        return (z >> bits) & ((1 << (64 - bits)) - 1)
    z = torch.arange(first, first + count, dtype=torch.int64, device="cuda") * signed(GOLDEN) + signed((seed << 40) & WORD)
    z = (z ^ shifted(z, 30)) * signed(MIX1)
    z = (z ^ shifted(z, 27)) * signed(MIX2)
    z ^= shifted(z, 31)
    total = sum(z >> 8 * i & 0xFF for i in range(4)) - 510
    return (total.float() * torch.tensor(deviation / 148, dtype=torch.float32)).to(dtype)


def ours(case):
    """(the data of the case's first set, the (row, query head) pairs that `ops bench` has compared)"""
    q_heads, kv_heads = case.heads()
    lengths, queries = shape(case)
    sets = sets_for(case.line["bytes"])
    draws = OpRandom(case.line["seed"])
    counts = page_counts(lengths)
    pages = sum(counts)
    ids = list(range(pages))
    for i in range(pages):
        other = draws.next() % pages
        ids[i], ids[other] = ids[other], ids[i]
    pool_seed, q_seed = (draws.next() & 0xFFFFFF for _ in range(2))
    half = kv_heads * PAGE * HEAD_DIM  # K of a page; V follows; then the other sets
    kv = torch.empty(2, pages, half, device="cuda", dtype=FP8 if case.fp8 else BF16)
    for page in range(pages):
        both = noise(pool_seed, page * 2 * half * sets, 2 * half, 1.0, kv.dtype)
        kv[0, page], kv[1, page] = both[:half], both[half:]
    k, v = kv.view(2, pages, kv_heads, PAGE, HEAD_DIM)
    rows = len(lengths) * queries
    q = noise(q_seed, 0, rows * q_heads * HEAD_DIM, 1.5, BF16).view(rows, q_heads, HEAD_DIM)
    data = AttentionData(case, q, k, v, torch.tensor(ids, dtype=torch.int32, device="cuda"))
    if case.fp8:
        data.scale *= K_SCALE
    return data, sampled(rows * q_heads, max(counts) * PAGE, q_heads, draws)


def sampled(pairs, longest, q_heads, draws):
    most = min(max((1 << 21) // longest, 16), 256)
    if pairs <= most:
        return [divmod(pair, q_heads) for pair in range(pairs)]
    chosen = {0 if i == 0 else pairs - 1 if i == 1 else draws.next() % pairs for i in range(most)}
    return [divmod(pair, q_heads) for pair in sorted(chosen)]


def exact(data, pairs):
    """The pairs' attention in float64, [pairs, 128], without V's scale."""
    group = data.q.shape[1] // data.k.shape[1]
    out = []
    for row, head in pairs:
        sequence, query = divmod(row, data.queries)
        first = sum(data.counts[:sequence])
        ids = data.ids[first:first + data.counts[sequence]].long()
        seen = data.lengths[sequence] - data.queries + query + 1
        k, v = (x[ids, head // group].reshape(-1, HEAD_DIM)[:seen].to(BF16).double() for x in (data.k, data.v))
        scores = k @ data.q[row, head].double() * data.scale
        out.append(torch.softmax(scores, 0) @ v)
    return torch.stack(out)


def relative_rms(got, data, pairs, want):
    got = got.reshape(data.q.shape)
    got = torch.stack([got[row, head] for row, head in pairs]).double()
    return math.sqrt(((got - want) ** 2).sum().item() / (want ** 2).sum().item())
