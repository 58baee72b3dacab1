"""What the CUDA peers share: a case of `tessera ops bench`, and timing by the same method (graph replays, inputs that
rotate past 3 x the level-2 cache, medians)."""

import re
import statistics
import time

import torch

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PART = "a part: "  # so begins the name of a peer that does not do all of the work: measured, and never the fastest
REPLAYS = 25
REPLAY_US = 2000  # about, of one graph
LONG_US, SUSTAINED_US = 100, 150e3  # launches as long as the first are replayed for as long as the second
BURSTS, PAUSE_S = 3, 0.11
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


class Replay:
    """A graph of `launches` that takes the calls in turn, replayed once already."""

    def __init__(self, calls, launches):
        self.graph, self.launches = torch.cuda.CUDAGraph(), launches
        with torch.cuda.graph(self.graph):
            for i in range(launches):
                calls[i % len(calls)]()
        self.us()

    def us(self):
        """Microseconds a launch."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / self.launches

    def median(self, estimate=0.0):
        """estimate: of a launch; long ones meet the power limit."""
        sustained = int(SUSTAINED_US / (estimate * self.launches)) + 1 if estimate >= LONG_US else 0
        return statistics.median(self.us() for _ in range(max(REPLAYS, sustained)))

    def burst(self):
        def after_pause():
            time.sleep(PAUSE_S)
            return self.us()
        return statistics.median(after_pause() for _ in range(BURSTS))


def time_peer(make, case):
    """(cold us, hot us, burst us or None, as in the case's own line) of make(), which returns a call on inputs of its own."""
    calls = [make() for _ in range(sets_for(case.line["bytes"]))]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compiles, plans and warms up outside of the graph
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    estimate = max(Replay(calls[:1], 4).median(), 0.5)
    launches = min(int(REPLAY_US / estimate), 2048)
    cold = Replay(calls, max(launches // len(calls) * len(calls), len(calls)))
    burst = cold.burst() if case.line["burst_us"] else None
    return cold.median(estimate), Replay(calls[:1], max(launches, 4)).median(estimate), burst
