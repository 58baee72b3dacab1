#!/usr/bin/env python3
"""A request whose numbers become NaN fails alone: those in the same steps are answered as without it.

The model's copy has NaN for the embedding of one token that no text has. Requests have it in their prompt (a row of a
prefill) or are made to generate it (then a row of a decode step); other requests run beside them. Needs a build of the
preset cuda and a device (or --device cpu, with any build). Exit status 1 when an answer differs or a bad request does not
fail.
"""

import argparse
import concurrent.futures
import json
import operator
import pathlib
import shutil
import sys
import tempfile
import urllib.error

from batch_invariance import ROOT, Server, prompts

TOKEN = 4095  # a place holder
GOOD = 6
BAD = 12
NEAR = 0.25  # of log-probabilities: bfloat16 in another order of sums


def copy_with_nan(model, folder):
    shutil.copytree(model, folder)
    for shard in folder.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        header_bytes = int.from_bytes(data[:8], "little")
        embedding = json.loads(data[8 : 8 + header_bytes]).get("model.embed_tokens.weight")
        if embedding is not None:
            width = embedding["shape"][1]
            at = 8 + header_bytes + embedding["data_offsets"][0] + TOKEN * width * 2
            data[at : at + width * 2] = b"\xc0\x7f" * width
            shard.write_bytes(data)
            return folder
    sys.exit(f"{model}: no model.embed_tokens.weight")


def fails(server, prompt, fields):
    """Whether the request ends as an error."""
    try:
        answer = server.complete(prompt, **fields)
    except urllib.error.HTTPError as error:
        return error.code == 500 and "NaN" in error.read().decode()
    print(f"a bad request was answered: {answer[0][:8]}")
    return False


def near(a, b):
    """Without --deterministic what else runs in a step may move the last bits, and so a token where two are as good: up to
    there, that one too, log-probabilities are about the same."""
    (a_tokens, a_logprobs, _), (b_tokens, b_logprobs, _) = a, b
    for a_token, b_token, a_logprob, b_logprob in zip(a_tokens, b_tokens, a_logprobs, b_logprobs):
        if not abs(a_logprob - b_logprob) < NEAR:
            return False
        if a_token != b_token:
            break
    return len(a_tokens) == len(b_tokens)


def run(arguments, flags):
    """Whether all is well with these flags."""
    good = prompts()[-GOOD:]
    bad = [(good[i % GOOD][:20] + [TOKEN], {}) if i % 2 else (good[i % GOOD], {"logit_bias": {str(TOKEN): 100}})
           for i in range(BAD)]
    server = Server(arguments, ["--no-enable-prefix-caching", *flags])
    try:
        alone = [server.complete(prompt) for prompt in good]
        with concurrent.futures.ThreadPoolExecutor(GOOD + BAD) as pool:
            answers = [pool.submit(server.complete, prompt) for prompt in good]
            failures = [pool.submit(fails, server, *request) for request in bad]
            beside = [answer.result() for answer in answers]
            failed = sum(failure.result() for failure in failures)
        after = [server.complete(prompt) for prompt in good]  # in pages that held NaN
    finally:
        server.stop()
    same = operator.eq if flags else near
    differ = [sum(not same(a, b) for a, b in zip(some, alone)) for some in (beside, after)]
    print(f"{' '.join(flags) or 'plain'}: {failed} of {BAD} bad requests failed; {differ[0]} of {GOOD} answers beside them "
          f"differ, {differ[1]} after them", flush=True)
    return failed == BAD and max(differ) == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default=str(ROOT / "build" / "cuda" / "tessera"))
    parser.add_argument("--model", default=str(ROOT / "models" / "demo"))
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if not shutil.which(arguments.binary):
        sys.exit(f"{arguments.binary}: is no program; build it with PRESET=cuda make build")
    with tempfile.TemporaryDirectory() as folder:
        arguments.model = str(copy_with_nan(arguments.model, pathlib.Path(folder) / "model"))
        well = [run(arguments, flags) for flags in ([], ["--deterministic"])]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
