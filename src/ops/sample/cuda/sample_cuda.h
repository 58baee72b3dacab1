// sample on the device: the rules of ops/sample/sample.h, and the same token for the same logits, seed and
// position.
//
// What a request's sampling depends on lies in device memory, by slot, so that a step can be launched before
// the host knows the tokens of the step before it: the sampler itself counts the outputs, the penalties and
// the forced tokens on.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "base/status.h"
#include "ops/sample/sample.h"

namespace tessera {

inline constexpr int32_t kSampleStopsMax = 96;
inline constexpr int32_t kSampleBiasMax = 1024;
inline constexpr int32_t kSampleForcedMax = 256;

// The sampler's state of one request.
struct SampleSlot {
    uint64_t seed = 0;
    float temperature = 1;  // 0 = greedy
    float top_p = 1;
    float min_p = 0;
    float repetition_penalty = 1;
    float presence_penalty = 0;
    float frequency_penalty = 0;
    int32_t top_k = 0;       // 0 = off
    int32_t min_tokens = 0;  // the stop ids are masked while there are fewer outputs
    int32_t outputs = 0;     // tokens made: the generator's counter. Advanced by the sampler
    int32_t logprobs = 0;    // 1: report log-probabilities
    int32_t top = 0;         // 0 .. kSampleTopMax
    int32_t bias_count = 0;
    int32_t stop_count = 0;
    // Forced tokens: how many have been emitted, or -1 while `forced_after` has not come. Advanced by the
    // sampler. A stop id that is sampled while it is -1 is replaced by `forced_after`.
    int32_t forced_count = 0;
    int32_t forced_next = 0;
    int32_t forced_after = -1;
    int32_t stop_ids[kSampleStopsMax] = {};

    constexpr bool has_penalties() const {
        return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
    }
};

// Device arrays, by slot.
struct SampleSlots {
    SampleSlot* slot = nullptr;  // [slots]
    // These four count where a slot has penalties, and may all be null where none has. Of other slots the
    // first two are read, too, whatever they hold.
    uint64_t* prompt_seen =
        nullptr;  // [slots][ceil(vocab / 64)] bit i % 64 of word i / 64: id i is in the prompt
    uint64_t* output_seen = nullptr;     // the same for the tokens made: where output_counts is not 0
    uint64_t* output_often = nullptr;    // the same for the tokens made more than once
    int32_t* output_counts = nullptr;    // [slots][vocab]
    const int32_t* bias_ids = nullptr;   // [slots][kSampleBiasMax]
    const float* bias_values = nullptr;  // [slots][kSampleBiasMax]
    const int32_t* forced = nullptr;     // [slots][kSampleForcedMax]
    int32_t* last_token = nullptr;       // [slots]: the token just made. May be null
};

struct SampleCudaArgs {
    const float* logits = nullptr;  // [rows, vocab]; left as they are
    int64_t logits_stride = 0;
    int64_t vocab = 0;
    int64_t rows = 0;
    // [rows], distinct; < 0: padding, passed over. A first look is taken while the kernel before still runs:
    // what lies there then may be old, but must be < 0 or a slot.
    const int32_t* row_slots = nullptr;
    const uint32_t* allowed =
        nullptr;  // [rows, ceil(vocab / 32)] bitmask of the ids that may be chosen; may be null
    SampleSlots slots;
    // sample_cuda_exchange_bytes() of device memory, 32-byte aligned, of one call at a time: zeros before the
    // first call, and left as they are between the calls.
    void* exchange = nullptr;
    int sm_count = 0;  // of the device
    // [rows]. A failed row has its error here and leaves its slot as it was.
    SampleRowResult* results = nullptr;
};

inline constexpr int64_t kSampleCudaVocabMax = 400000;
inline constexpr int64_t kSampleCudaRowsMax = 65535;

// What thread blocks tell each other.
int64_t sample_cuda_exchange_bytes(int64_t vocab, int64_t rows);

// Takes what sample_cuda() needs from the device; once, before the first call. An error where the vocabulary
// is too large.
Status sample_cuda_prepare(int64_t vocab);
void sample_cuda(cudaStream_t stream, const SampleCudaArgs& args);

// Sets the penalties' arrays of one slot: which ids the prompt holds, how often each has been generated.
// Needed when a request with penalties takes the slot.
struct SampleHistoryArgs {
    SampleSlots slots;
    int64_t vocab = 0;
    int32_t slot = 0;
    const int32_t* prompt = nullptr;  // [prompt_count], device memory, each in [0, vocab)
    int64_t prompt_count = 0;
    const int32_t* output = nullptr;  // [output_count]
    int64_t output_count = 0;
};
void sample_history_cuda(cudaStream_t stream, const SampleHistoryArgs& args);

}  // namespace tessera
