"""FlashInfer: paged decode and prefill with page 64. Its kernels are compiled at first use; FLASHINFER_WORKSPACE_BASE may
name a folder where they are already."""

import flashinfer
import torch

import compile_peer
from attention_data import HEAD_DIM, PAGE, drawn
from cuda_peer import BF16, FP8, random


def peers(case, make_data=drawn):
    if case.op == "attention_decode" and case.n.get("q_len", 1) == 1:
        yield "FlashInfer FA2", lambda: fa2_decode(make_data(case))
        yield "FlashInfer XQA", lambda: xqa_decode(make_data(case))
        if not case.fp8:
            yield "FlashInfer FA3", lambda: fa3_decode(make_data(case))
    if case.op == "attention_prefill":
        yield "FlashInfer FA2", lambda: prefill(make_data(case), "fa2")
        if case.fp8:
            yield "FlashInfer FA3, q in e4m3", lambda: prefill_e4m3(make_data(case))
        else:
            yield "FlashInfer FA3", lambda: prefill(make_data(case), "fa3")
    if case.op == "rms_norm" and "add" in case.words and not {"and", "scales"} & set(case.words):
        yield "FlashInfer", lambda: norm(case)
    if case.op == "sample" and "everything" not in case.words:
        if "penalties" in case.words:
            yield "FlashInfer, penalties by torch.compile", lambda: sample(case)
        elif {"temperature", "top_k=50"} & set(case.words):
            yield "FlashInfer", lambda: sample(case)


def indices(data):
    indptr = torch.tensor([0, *torch.tensor(data.counts).cumsum(0).tolist()], dtype=torch.int32)
    last = torch.tensor([(length - 1) % PAGE + 1 for length in data.lengths], dtype=torch.int32)
    return indptr, last


def heads(data):
    return data.q.shape[1], data.k.shape[1]


def workspace():
    return torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")


def fa2_decode(data):
    indptr, last = indices(data)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "HND", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.cuda(), paged_kv_indices_buffer=data.ids.clone(),
        paged_kv_last_page_len_buffer=last.cuda(), backend="fa2")
    wrapper.plan(indptr, data.ids, last, *heads(data), HEAD_DIM, PAGE, q_data_type=BF16, kv_data_type=data.k.dtype,
                 sm_scale=data.scale)
    return lambda: wrapper.run(data.q, (data.k, data.v), out=data.out)


def fa3_decode(data):
    """Prefill of one query a sequence: FlashInfer has no other way into its FA3 kernels."""
    indptr, last = indices(data)
    queries = torch.arange(len(data.lengths) + 1, dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(), "HND", use_cuda_graph=True, qo_indptr_buf=queries.cuda(), paged_kv_indptr_buf=indptr.cuda(),
        paged_kv_indices_buf=data.ids.clone(), paged_kv_last_page_len_buf=last.cuda(), backend="fa3")
    wrapper.plan(queries, indptr, data.ids, last, *heads(data), HEAD_DIM, PAGE, causal=True, q_data_type=BF16,
                 kv_data_type=data.k.dtype, sm_scale=data.scale)
    return lambda: wrapper.run(data.q, (data.k, data.v), out=data.out)


def xqa_decode(data):
    tables = torch.zeros(len(data.lengths), max(data.counts), dtype=torch.int32, device="cuda")
    first = 0
    for row, count in enumerate(data.counts):
        tables[row, :count] = data.ids[first:first + count]
        first += count
    seq_lens = torch.tensor(data.lengths, dtype=torch.int32, device="cuda")
    space = workspace()
    return lambda: flashinfer.decode.xqa_batch_decode_with_kv_cache(
        data.q, (data.k, data.v), space, tables, seq_lens, max(data.lengths), bmm1_scale=data.scale, bmm2_scale=1.0,
        kv_layout="HND", out=data.out)


def prefill_wrapper(data, backend, q_dtype):
    indptr, last = indices(data)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "HND", backend=backend)
    wrapper.plan(torch.tensor([0, data.queries], dtype=torch.int32), indptr, data.ids, last, *heads(data), HEAD_DIM, PAGE,
                 causal=True, q_data_type=q_dtype, kv_data_type=data.k.dtype, o_data_type=BF16, sm_scale=data.scale)
    return wrapper


def prefill(data, backend):
    wrapper = prefill_wrapper(data, backend, BF16)
    return lambda: wrapper.run(data.q, (data.k, data.v), out=data.out)


def prefill_e4m3(data):
    """q comes in e4m3 with a scale a head, which is not in the time."""
    scales = data.q.float().abs().amax((0, 2)) / 448
    q = (data.q.float() / scales[:, None]).to(FP8)
    ones = torch.ones(data.k.shape[1], device="cuda")
    wrapper = prefill_wrapper(data, "fa3", FP8)
    return lambda: wrapper.run(q, (data.k, data.v), scales, ones, ones, out=data.out)


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
