"""torch's scaled_dot_product_attention by cuDNN, on contiguous K and V in bfloat16."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cuda_peer import random


def peers(case):
    if case.fp8:
        return
    if case.op == "attention_decode" and case.n.get("q_len", 1) == 1 and len(set(case.lengths())) == 1:
        yield "torch SDPA (cuDNN, contiguous)", lambda: call(case, len(case.lengths()), 1, case.lengths()[0])
    if case.op == "attention_prefill" and case.words[2] == "0":
        yield "torch SDPA (cuDNN, contiguous)", lambda: call(case, 1, int(case.words[0]), int(case.words[0]))


def call(case, batch, queries, slots):
    q_heads, kv_heads = case.heads()
    q = random(batch, q_heads, queries, 128)
    k, v = (random(batch, kv_heads, slots, 128) for _ in range(2))

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            scaled_dot_product_attention(q, k, v, is_causal=queries > 1, enable_gqa=q_heads != kv_heads)
    return run
