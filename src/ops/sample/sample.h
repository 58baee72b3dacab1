// sample: logits -> the next token of each row, and log-probabilities.
//
// The order is vLLM's (V1): allowed-token mask, masked ids (min_tokens), logit_bias, repetition then
// frequency then presence penalty, temperature, min_p, top_k, top_p, draw. temperature 0 takes the largest
// logit after the penalties (ties: the lowest id). Log-probabilities are of the raw logits, before all of
// this.
//
// Draws. Each probability is held as an integer weight, round(2^26 exp((x - max) / temperature)), so sums are
// exact and do not depend on their order; what is less probable than the best token by 2^-27 is never drawn;
// nor, where nothing cuts, is a token of a run of 32 ids that together weigh less than 2^-21 of their tile's
// best.
// Philox4x32-10, keyed by the seed and counted by the output position, gives two fractions of 64 bits; the
// token is the one whose range of the running sum, in order of ids, holds the first fraction of the total. So
// a draw depends on (seed, position, distribution) alone. top_p keeps the smallest set of most probable
// tokens (ties: lowest ids first) whose share of what top_k left reaches top_p; top_k keeps all tokens that
// tie with the k-th, as vLLM does.
//
// Where neither top_k nor min_p cuts, a row can be weighed in the one pass that reads it: each tile of 1,024
// ids by its own best token, and the tiles' sums, brought to the row's best, against each other. Their sum is
// what top_p is a share of; and where nothing at all is cut, the first fraction chooses a tile, the second a
// token of it.
//
// Drafts. An MTP layer drafts its best token, with certainty, so rejection sampling comes down to this
// operator: a row for each position, with the history and position that it has if the drafts before it are
// right; a draft is accepted where the token drawn equals it, else that token is made in its place, and the
// rows after it do not count. Both ways the token has the row's distribution.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "device/host_buffer.h"
#include "ops/op_context.h"

namespace tessera {

inline constexpr int32_t kSampleTopMax = 20;

struct SampleRowArgs {
    const float* logits = nullptr;  // [vocab]; left as they are
    float temperature = 1;          // 0 = greedy
    int32_t top_k = 0;              // 0 = off
    float top_p = 1;
    float min_p = 0;
    float repetition_penalty = 1;
    float presence_penalty = 0;
    float frequency_penalty = 0;
    const uint64_t* prompt_seen =
        nullptr;  // [ceil(vocab / 64)] bit i % 64 of word i / 64: id i is in the prompt; may be null
    const int32_t* output_counts = nullptr;  // [vocab]: how often each id has been generated; may be null
    const uint32_t* allowed =
        nullptr;  // [ceil(vocab / 32)] bitmask of the ids that may be chosen; may be null: all
    std::span<const int32_t> masked;  // ids that may not be chosen (stop ids before min_tokens)
    std::span<const std::pair<int32_t, float>> logit_bias;
    uint64_t seed = 0;
    uint64_t position = 0;  // output position: the generator's counter
    int32_t forced_token =
        -1;  // >= 0: this token is taken whatever the logits say (log-probabilities still reported)
    bool logprobs = false;  // report the chosen token's log-probability, and those of the `top` most probable
    int32_t top = 0;        // 0 .. kSampleTopMax
};

enum class SampleError : uint8_t {
    kNone,
    kNotFinite,  // a NaN or +inf among the logits
    kNoToken,    // every token is masked or -inf
};
std::string_view sample_error_name(SampleError error);

struct SampleLogprob {
    int32_t token = 0;
    float logprob = 0;
};

struct SampleRowResult {
    int32_t token = -1;
    float logprob = 0;
    int32_t top_count = 0;
    std::array<SampleLogprob, kSampleTopMax> top{};  // most probable first (ties: lowest id first)
    SampleError error = SampleError::kNone;          // of this row alone
};

// Memory of the fast version: one row's logits and weights per thread. Made once.
class SampleWorkspace {
  public:
    static Result<SampleWorkspace> create(int64_t vocab, int threads);
    int64_t vocab() const { return vocab_; }
    std::byte* thread_memory(int thread) const { return memory_.data() + thread * stride_; }

  private:
    explicit SampleWorkspace(int64_t vocab) : vocab_(vocab) {}

    int64_t vocab_ = 0;
    int64_t stride_ = 0;  // bytes
    HostBuffer memory_;
};

struct SampleArgs {
    int64_t vocab = 0;
    std::span<const SampleRowArgs> rows;
    std::span<SampleRowResult> results;  // one for each row
    const SampleWorkspace* workspace = nullptr;
};

// Rows are split over the threads.
void sample(OpContext& context, const SampleArgs& args);
// The plain reference: sorts everything; the same tokens. `workspace` is not used.
void sample_ref(const SampleArgs& args);

}  // namespace tessera
