// Scorer: teacher-forced passes over one sequence, without an engine: what `score` and `eval` need.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device/host_buffer.h"
#include "model/hy3_model.h"
#include "types/token_event.h"

namespace tessera {

// The `count` largest, most probable first, ties to the lowest id; values are log-probabilities.
std::vector<TokenLogprob> top_logprobs(std::span<const float> logits, int32_t count);
TokenId argmax(std::span<const float> logits);  // ties to the lowest id

class Scorer {
  public:
    struct Row {
        int32_t position = 0;
        std::span<const float> logits;
        float log_sum_exp = 0;       // of the logits
        std::span<const float> mtp;  // empty unless asked for; mtp[v] is about the token two positions on
    };
    using Visit = std::function<void(const Row& row)>;

    // For sequences of up to `tokens_max` tokens; the pool is allocated here, and refused where it does not
    // fit. REQUIRES: the model's logit_rows_max is at least its tokens_max.
    static Result<Scorer> create(Hy3Model& model, int32_t chunk_tokens, int32_t tokens_max);

    // One prefill of `tokens` in chunks. `visit` sees the positions from `first_visited` on, in order. With
    // mtp the MTP layer runs over every position t, fed with token t + 1; at the last one with the greedy
    // token. Ends with an error at the first of these positions whose logits are not numbers.
    Status run(std::span<const TokenId> tokens, int32_t first_visited, bool mtp, const Visit& visit);

  private:
    struct Memory {
        HostBuffer logits, mtp_logits;  // [chunk, vocab]
        HostBuffer hidden;              // [chunk, hidden]
    };
    Scorer(Hy3Model& model, int32_t chunk_tokens, int64_t pages, std::unique_ptr<PagePool> pool,
           Memory memory);

    struct Chunk {
        int32_t begin = 0, end = 0;
    };
    void run_mtp(std::span<const TokenId> tokens, Chunk chunk, std::span<const int32_t> rows,
                 int32_t sequence_length);

    Hy3Model& model_;
    const int32_t chunk_tokens_;
    std::unique_ptr<PagePool> pool_;
    std::vector<PageId> pages_;
    Memory memory_;
};

}  // namespace tessera
