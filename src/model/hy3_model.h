// Hy3Model: one forward pass of hy_v3 over a batch of sequences on the CPU, with a paged KV cache. It knows
// nothing of requests or of page policy.
//
// Numbers: float32 activations over the checkpoint's weights; every sum runs in a fixed
// order that depends on neither the batch nor the chunking, so a token's result is the same bits in any
// company.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "model/observer.h"
#include "types/model_config.h"
#include "types/page_format.h"
#include "weights/model_weights.h"

namespace tessera {

struct ModelOptions {
    DType kv_dtype = DType::kFloat32;  // kFloat32 or kBFloat16
    bool weight_only = false;          // FP8 checkpoints: do not quantise activations
    int32_t tokens_max = 2048;         // largest batch, in tokens; fixes the workspaces
    int32_t logit_rows_max = 256;
    // For calibration: every pass adds what it sees. Emptied by create(). On the CPU, with a float32 cache.
    ActivationObserver* observer = nullptr;
};

// A run of consecutive tokens of one sequence inside a batch.
struct SequenceSpan {
    int32_t first = 0;              // index of its first token in the batch
    int32_t q_len = 0;              // >= 1
    int32_t position = 0;           // of its first token; earlier positions are in the pages already
    std::span<const PageId> pages;  // page i holds slots [64 i, 64 i + 64); covers all slots written here
};

// The pages of a pool, where the model computes (host or device memory): page p begins at data + p *
// stride_bytes.
struct PagePoolView {
    std::byte* data = nullptr;
    int64_t stride_bytes = 0;
};

// Owns the memory of a pool.
class PagePool {
  public:
    virtual ~PagePool() = default;
    virtual PagePoolView view() const = 0;
};

struct ForwardBatch {
    std::span<const TokenId> tokens;          // [T]
    std::span<const SequenceSpan> sequences;  // cover the T tokens in order
    std::span<const int32_t> logit_rows;      // batch indices whose logits are wanted, ascending
    PagePoolView pool;
};

struct ForwardOutput {
    float* logits = nullptr;  // [logit_rows, vocab]
    float* hidden = nullptr;  // [T, hidden] after the final norm (what the MTP layer takes); may be null
};

// For the layer-by-layer comparison with the reference; null members are skipped.
struct ForwardTrace {
    std::vector<std::vector<float>>
        hidden;  // [layers + 1][T * hidden]: 0 = embeddings, last = after the final norm
    std::vector<std::vector<float>> router_logits;  // [layers][T * experts], empty for dense layers
};

// The MTP layer over entries (hidden state t, token t + 1): entry at batch index i has RoPE position
// sequence.position + (i - first) and writes KV slot position + 1; it attends the slots 1 .. position + 1.
struct MtpBatch {
    const float* hidden = nullptr;         // [T, hidden]: final-normed state of t
    std::span<const TokenId> next_tokens;  // [T]: token t + 1
    std::span<const SequenceSpan> sequences;
    std::span<const int32_t> logit_rows;
    PagePoolView pool;
};

class Hy3Model {
  public:
    // Packs the weights into the kernels' layouts; `weights` and its memory may go afterwards. `pool` must
    // outlive the model. Refuses what it cannot compute (for example head_dim not a multiple of 16), naming
    // the field.
    static Result<std::unique_ptr<Hy3Model>> create(const ModelConfig& config, const ModelWeights& weights,
                                                    const ModelOptions& options, ThreadPool& pool);
    virtual ~Hy3Model() = default;

    virtual const ModelConfig& config() const = 0;
    virtual const PageFormat& page_format() const = 0;
    virtual int64_t packed_bytes() const = 0;
    // A pool of `pages` pages. It must not outlive the model.
    virtual Result<std::unique_ptr<PagePool>> make_pool(int64_t pages) = 0;

    // Writes K and V of every token into the pages (and a page's trailer when its last slot is written), and
    // the wanted outputs. REQUIRES: T in [1, tokens_max], tokens in range. One caller at a time.
    virtual void forward(const ForwardBatch& batch, const ForwardOutput& output,
                         ForwardTrace* trace = nullptr) = 0;
    // REQUIRES: config().num_mtp_layers == 1. output.hidden = final-normed state y' (the p of a chained
    // draft).
    virtual void mtp_forward(const MtpBatch& batch, const ForwardOutput& output) = 0;
};

}  // namespace tessera
