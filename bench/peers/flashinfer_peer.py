"""FlashInfer: paged decode and prefill with page 64. Its kernels are compiled at first use; FLASHINFER_WORKSPACE_BASE may
name a folder where they are already."""

import flashinfer
import torch

import compile_peer
from cuda_peer import BF16, FP8, random

PAGE = 64


def peers(case):
    if case.op == "attention_decode" and case.n.get("q_len", 1) == 1:
        yield "FlashInfer FA2", lambda: fa2_decode(case)
        yield "FlashInfer XQA", lambda: xqa_decode(case)
        if not case.fp8:
            yield "FlashInfer FA3", lambda: fa3_decode(case)
    if case.op == "attention_prefill":
        yield "FlashInfer FA2", lambda: prefill(case, "fa2")
        if not case.fp8:
            yield "FlashInfer FA3", lambda: prefill(case, "fa3")
    if case.op == "rms_norm" and "add" in case.words and not {"and", "scales"} & set(case.words):
        yield "FlashInfer", lambda: norm(case)
    if case.op == "sample" and "everything" not in case.words:
        if "penalties" in case.words:
            yield "FlashInfer, penalties by torch.compile", lambda: sample(case)
        elif {"temperature", "top_k=50"} & set(case.words):
            yield "FlashInfer", lambda: sample(case)


def paged(case, lengths):
    """K and V [pages, kv heads, 64, 128], and each sequence's pages, in random order."""
    kv_heads = case.heads()[1]
    counts = [(length + PAGE - 1) // PAGE for length in lengths]
    kv = random(2, sum(counts), kv_heads, PAGE, 128, dtype=FP8 if case.fp8 else BF16)
    ids = torch.randperm(sum(counts), dtype=torch.int32, device="cuda")
    return kv, counts, ids


def indices(counts, lengths):
    indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    last = torch.tensor([(length - 1) % PAGE + 1 for length in lengths], dtype=torch.int32)
    return indptr, last


def workspace():
    return torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")


def fa2_decode(case):
    q_heads, kv_heads = case.heads()
    lengths = case.lengths()
    kv, counts, ids = paged(case, lengths)
    indptr, last = indices(counts, lengths)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "HND", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.cuda(), paged_kv_indices_buffer=ids.clone(),
        paged_kv_last_page_len_buffer=last.cuda(), backend="fa2")
    wrapper.plan(indptr, ids, last, q_heads, kv_heads, 128, PAGE, q_data_type=BF16, kv_data_type=kv.dtype)
    q = random(len(lengths), q_heads, 128)
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, (kv[0], kv[1]), out=out)


def fa3_decode(case):
    """Prefill of one query a sequence: FlashInfer has no other way into its FA3 kernels."""
    q_heads, kv_heads = case.heads()
    lengths = case.lengths()
    kv, counts, ids = paged(case, lengths)
    indptr, last = indices(counts, lengths)
    queries = torch.arange(len(lengths) + 1, dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(), "HND", use_cuda_graph=True, qo_indptr_buf=queries.cuda(), paged_kv_indptr_buf=indptr.cuda(),
        paged_kv_indices_buf=ids.clone(), paged_kv_last_page_len_buf=last.cuda(), backend="fa3")
    wrapper.plan(queries, indptr, ids, last, q_heads, kv_heads, 128, PAGE, causal=True, q_data_type=BF16,
                 kv_data_type=kv.dtype)
    q = random(len(lengths), q_heads, 128)
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, (kv[0], kv[1]), out=out)


def xqa_decode(case):
    q_heads, _ = case.heads()
    lengths = case.lengths()
    kv, counts, ids = paged(case, lengths)
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = ids[first:first + count]
        first += count
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    q = random(len(lengths), q_heads, 128)
    out = torch.empty_like(q)
    space = workspace()
    return lambda: flashinfer.decode.xqa_batch_decode_with_kv_cache(
        q, (kv[0], kv[1]), space, tables, seq_lens, max(lengths), bmm1_scale=128 ** -0.5, bmm2_scale=1.0,
        kv_layout="HND", out=out)


def prefill(case, backend):
    q_heads, kv_heads = case.heads()
    queries, cached = int(case.words[0]), int(case.words[2])
    kv, counts, ids = paged(case, [queries + cached])
    indptr, last = indices(counts, [queries + cached])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "HND", backend=backend)
    wrapper.plan(torch.tensor([0, queries], dtype=torch.int32), indptr, ids, last, q_heads, kv_heads, 128, PAGE,
                 causal=True, q_data_type=BF16, kv_data_type=kv.dtype)
    q = random(queries, q_heads, 128)
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, (kv[0], kv[1]), out=out)


def norm(case):
    rows, width = case.n["rows"], case.n["width"]
    x, residual, weight = random(rows, width), random(rows, width), random(width)
    if not case.fp8:
        return lambda: flashinfer.norm.fused_add_rmsnorm(x, residual, weight, 1e-5, enable_pdl=True)
    out = torch.empty(rows, width, device="cuda", dtype=FP8)
    scale = torch.tensor([0.013], device="cuda")
    return lambda: flashinfer.norm.fused_add_rmsnorm_quant(out, x, residual, weight, scale, 1e-5, enable_pdl=True)


def sample(case):
    """Without penalties the logits come divided by their temperature: FlashInfer's samplers do not divide."""
    logits = torch.rand(case.n["rows"], case.n["vocab"], device="cuda") * 24 - 12
    if "temperature" in case.words:
        return lambda: flashinfer.sampling.sampling_from_logits(logits, seed=1, offset=0)
    top_p = next(float(word[6:]) for word in case.words if word.startswith("top_p="))
    choose = flashinfer.sampling.top_k_top_p_sampling_from_logits
    if "penalties" not in case.words:
        return lambda: choose(logits, 50, top_p, seed=1, offset=0)
    seen, counts = compile_peer.history(case)
    penalise = compile_peer.compiled(compile_peer.penalise)
    return lambda: choose(penalise(logits, seen, counts), 50, top_p, seed=1, offset=0)
