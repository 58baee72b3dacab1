"""cuBLASLt through torch: bf16 by matmul, fp8 by _scaled_mm (per tensor, or a scale for each row and output)."""

import torch

from cuda_peer import BF16, FP8, random


def peers(case):
    if case.op == "router_logits" and case.dtype == "bfloat16":
        yield "cuBLAS bf16 to float32", lambda: bf16_call(case.n["tokens"], case.n["width"], case.n["experts"], True)
    if case.op != "linear":
        return
    rows, inputs, outputs = case.n["rows"], case.n["inputs"], case.n["outputs"]
    accumulate = "+=" in case.words
    if case.fp8:
        yield ("torch._scaled_mm" + (" and add" if accumulate else ""),
               lambda: fp8_call(rows, inputs, outputs, "scales" in case.words, accumulate))
    else:
        yield "torch.matmul", lambda: bf16_call(rows, inputs, outputs, "float32" in case.words, accumulate)


def bf16_call(rows, inputs, outputs, float_out=False, accumulate=False):
    x, weight = random(rows, inputs), random(outputs, inputs)
    y = torch.zeros(rows, outputs, device="cuda", dtype=torch.float32 if float_out else BF16)
    if accumulate:
        return lambda: torch.addmm(y, x, weight.t(), out=y)
    if float_out:
        return lambda: torch.mm(x, weight.t(), out_dtype=torch.float32)
    return lambda: torch.mm(x, weight.t(), out=y)


def fp8_call(rows, inputs, outputs, channel_scales, accumulate):
    padded = (rows + 15) // 16 * 16
    x, weight = random(padded, inputs, dtype=FP8), random(outputs, inputs, dtype=FP8)
    if channel_scales:
        scales = [torch.ones(padded, 1, device="cuda"), torch.ones(1, outputs, device="cuda")]
    else:
        scales = [torch.ones((), device="cuda"), torch.ones((), device="cuda")]
    y = torch.zeros(padded, outputs, device="cuda", dtype=BF16)

    def call():
        product = torch._scaled_mm(x, weight.t(), scales[0], scales[1], out_dtype=BF16)
        if accumulate:
            y.add_(product)
    return call
