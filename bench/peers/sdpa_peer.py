"""torch's scaled_dot_product_attention by cuDNN, on contiguous K and V in bfloat16."""

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention_data import HEAD_DIM, drawn


def peers(case, make_data=drawn):
    if case.fp8:
        return
    if case.op == "attention_decode" and case.n.get("q_len", 1) == 1 and len(set(case.lengths())) == 1:
        yield "torch SDPA (cuDNN, contiguous)", lambda: call(make_data(case))
    if case.op == "attention_prefill" and case.words[2] == "0":
        yield "torch SDPA (cuDNN, contiguous)", lambda: call(make_data(case))


def call(data):
    batch, slots = len(data.lengths), data.lengths[0]
    heads = data.q.shape[1], data.k.shape[1]
    q = data.q.view(batch, data.queries, heads[0], HEAD_DIM).transpose(1, 2).contiguous()
    pages = data.ids.view(batch, -1).long()
    k, v = (x[pages].transpose(1, 2).reshape(batch, heads[1], -1, HEAD_DIM)[:, :, :slots] for x in (data.k, data.v))

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=data.queries > 1, enable_gqa=heads[0] != heads[1],
                                                scale=data.scale).transpose(1, 2)
    return run
