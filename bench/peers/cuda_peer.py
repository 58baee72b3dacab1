"""What the CUDA peers share: a case of `tessera ops bench`, and timing by the same method (graph replays, inputs that
rotate past 3 x the level-2 cache, medians)."""

import re

import torch

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
REPLAYS = 25
REPLAY_US = 2000  # about, of one graph
CASE_BYTES_MAX = 60 << 30


class Case:
    """A line of `tessera ops bench --json`. n: the numbers of its shape; words: the rest of it."""

    def __init__(self, line):
        self.line = line
        self.op, self.shape, self.dtype = line["op"], line["shape"], line["dtype"]
        self.n = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)\b(?!\.)", self.shape)}
        self.words = self.shape.split()
        self.fp8 = self.dtype == "fp8_e4m3"

    def heads(self):
        """(query heads, KV heads) of an attention case."""
        return tuple(int(n) for n in next(word for word in self.words if "/" in word).split("/"))

    def lengths(self):
        """Slots of each sequence of a decode case, such as 1x65536+15x4096."""
        parts = [part.split("x") for part in self.words[0].split("+")]
        return [int(slots) for count, slots in parts for _ in range(int(count))]


def random(*shape, dtype=BF16, deviation=1.0):
    values = torch.empty(shape, device="cuda", dtype=BF16).normal_(0, deviation)
    return values if dtype == BF16 else values.to(dtype)


def sets_for(bytes_of_case):
    wanted = 3 * torch.cuda.get_device_properties(0).L2_cache_size // max(bytes_of_case, 1) + 1
    return int(max(1, min(wanted, 512, CASE_BYTES_MAX // max(bytes_of_case, 1))))


def replay(calls, launches):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            calls[i % len(calls)]()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return sorted(times)[REPLAYS // 2]


def time_peer(make, case):
    """(cold us, hot us) of make(), which returns a call on inputs of its own."""
    calls = [make() for _ in range(sets_for(case.line["bytes"]))]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compiles, plans and warms up outside of the graph
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    estimate = max(replay(calls[:1], 4), 0.5)
    launches = min(int(REPLAY_US / estimate), 2048)
    cold = replay(calls, max(launches // len(calls) * len(calls), len(calls)))
    return cold, replay(calls[:1], max(launches, 4))
