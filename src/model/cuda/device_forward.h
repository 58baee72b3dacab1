// DeviceForward: the forward pass of hy_v3 as launches on a stream. Everything that changes from step to step
// lies in device memory, nothing is allocated and nothing waits, so a pass can be captured in a graph.
//
// Activations and the residual stream are bfloat16, sums and logits float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "base/status.h"
#include "device/cuda/buffer.h"
#include "device/cuda/device_props.h"
#include "model/cuda/device_weights.h"
#include "model/cuda/pass_observer.h"
#include "ops/attention/cuda/attention_cuda.h"
#include "ops/linear/cuda/linear_cuda.h"
#include "types/page_format.h"

namespace tessera {

struct DeviceForwardOptions {
    DType kv_dtype = DType::kBFloat16;
    int32_t tokens_max = 0;
    int32_t logit_rows_max = 0;
    int32_t sequences_max = 0;  // <= 1024
    int32_t positions_max = 0;  // of a sequence
    // A token's bits depend on its sequence alone: one plan of each matrix product for every number of rows,
    // and the prefill kernel for decode rows, so that neither company nor chunking nor a recomputation can be
    // seen.
    bool deterministic = false;
};

// One pass: first `decode_rows` sequences of one token each, then `prefill_rows` sequences of any length. Row
// b of the page tables is sequence b. Pointers are to device memory.
struct DeviceBatch {
    int32_t tokens_count = 0;  // T
    int32_t decode_rows = 0;
    int32_t prefill_rows = 0;
    int32_t logit_count = 0;
    const int32_t* tokens = nullptr;           // [T]; < 0 is padding
    const int32_t* positions = nullptr;        // [T]; < 0 is padding
    const int32_t* sequences = nullptr;        // [T]
    const int32_t* first_positions = nullptr;  // [decode_rows + prefill_rows]: of each sequence's first token
    const int32_t* prefill_first_rows =
        nullptr;  // [prefill_rows + 1]: token index, counted from token decode_rows on
    const int32_t* page_tables = nullptr;  // [decode_rows + prefill_rows, pages_max()]
    const int32_t* logit_rows = nullptr;   // [logit_count] token indices; null: the first logit_count tokens
    std::byte* pool = nullptr;             // pages, page_format().page_bytes() apart
};

class DeviceForward {
    struct Key {};  // create() alone makes one

  public:
    DeviceForward(Key key, const ModelConfig& config, DeviceWeights weights,
                  const DeviceForwardOptions& options, const DeviceProps& device);
    // Takes its workspaces from the budget, which must outlive it.
    static Result<std::unique_ptr<DeviceForward>> create(const ModelConfig& config, DeviceWeights weights,
                                                         const DeviceForwardOptions& options,
                                                         const DeviceProps& device, MemoryBudget& budget);
    // One pass at a time: all passes use the same workspaces.
    void forward(cudaStream_t stream, const DeviceBatch& batch);
    // The MTP layer: token index i stands for the entry (hidden state of position[i], tokens[i] = the token
    // after it). hidden: [T, hidden]. Prefill rows only.
    void mtp_forward(cudaStream_t stream, const DeviceBatch& batch, const __nv_bfloat16* hidden);

    // Told of the operators of the passes from here on; null: nobody.
    void observe(PassObserver* observer) { observer_ = observer; }
    // Around launches that belong to `op`: the passes' own, and what a runner enters before and after.
    PassSection section(cudaStream_t stream, PassOperator op) const { return {observer_, stream, op}; }

    const ModelConfig& config() const { return config_; }
    const PageFormat& page_format() const { return format_; }
    const DeviceForwardOptions& options() const { return options_; }
    const DeviceProps& device() const { return device_; }
    // Of the layers' MLPs and experts, which are nearly all of the weights.
    DType projection_dtype() const { return weights_.layers.back().mlp.tensors.dtype; }
    int64_t weight_bytes() const { return weights_.bytes(); }
    int32_t pages_max() const { return pages_max_; }
    // Of the last pass: [logit_count, vocab], and [T, hidden] after the final norm.
    const float* logits() const { return logits_; }
    const __nv_bfloat16* hidden() const { return normed_; }

  private:
    struct Norm {
        const __nv_bfloat16* weight = nullptr;
        __nv_bfloat16* y = nullptr;          // may be null
        const DeviceMatrix* next = nullptr;  // the matrix that takes the result; null: not a projection
    };

    Status allocate(MemoryBudget& budget);
    Status upload_rope(MemoryBudget& budget);

    void embed(cudaStream_t stream, const DeviceBatch& batch);
    void plan_attention(cudaStream_t stream, const DeviceBatch& batch, int32_t first_slot);
    void block(cudaStream_t stream, const DeviceBatch& batch, const DeviceLayer& layer, int64_t kv_layer);
    void attend(cudaStream_t stream, const DeviceBatch& batch, const DeviceLayer& layer, int64_t kv_layer);
    void qkv_post(cudaStream_t stream, const DeviceBatch& batch, const DeviceLayer& layer, int64_t kv_layer);
    bool decode_quantises(const DeviceLayer& layer) const;
    void attention_out(cudaStream_t stream, const DeviceBatch& batch, const DeviceLayer& layer);
    void route(cudaStream_t stream, const DeviceBatch& batch, const DeviceLayer& layer);
    void feed_forward(cudaStream_t stream, const DeviceBatch& batch, const DeviceLayer& layer);
    void project(cudaStream_t stream, const DeviceMatrix& matrix, LinearCudaArgs args);
    void norm(cudaStream_t stream, const DeviceBatch& batch, const Norm& args);
    void finish(cudaStream_t stream, const DeviceBatch& batch, const __nv_bfloat16* norm_weight);
    DecodePlanCudaArgs decode_plan(const DeviceBatch& batch) const;
    PrefillPlanCudaArgs decode_rows_plan(const DeviceBatch& batch) const;
    PrefillPlanCudaArgs prefill_plan(const DeviceBatch& batch) const;
    float eps() const { return static_cast<float>(config_.rms_norm_eps); }
    int64_t qkv_width() const { return config_.q_width() + 2 * config_.kv_width(); }

    const ModelConfig config_;
    const DeviceForwardOptions options_;
    const DeviceProps device_;
    const DeviceWeights weights_;
    PageFormat format_;
    int32_t pages_max_ = 0;
    AttentionCudaShape shape_;
    int32_t first_slot_ = 0;  // of the pass being launched
    PassObserver* observer_ = nullptr;

    DeviceBuffer activations_memory_, linear_memory_, attention_memory_, moe_memory_, rope_memory_,
        logits_memory_;
    std::unique_ptr<LinearCuda> linear_;
    __nv_bfloat16* residual_ = nullptr;    // [T, hidden]
    __nv_bfloat16* normed_ = nullptr;      // [T, hidden]
    uint8_t* normed8_ = nullptr;           // [T, hidden] e4m3
    __nv_bfloat16* qkv_ = nullptr;         // [T, q_width + 2 kv_width]
    __nv_bfloat16* attention_ = nullptr;   // [T, q_width]
    uint8_t* attention8_ = nullptr;        // [T, q_width] e4m3
    __nv_bfloat16* pair_ = nullptr;        // [T, 2 hidden]: the MTP projection's input
    __nv_bfloat16* head_input_ = nullptr;  // [logit_rows, hidden]
    float* router_logits_ = nullptr;       // [T, experts]
    float* expert_weights_ = nullptr;      // [T, k]
    int32_t* chosen_ = nullptr;            // [T, k]
    std::byte* router_workspace_ = nullptr;
    std::byte* decode_workspace_ = nullptr;
    std::byte* prefill_workspace_ = nullptr;
    std::byte* decode_rows_workspace_ = nullptr;  // deterministic: decode rows as a prefill of one token each
    int32_t* row_numbers_ = nullptr;              // [sequences_max + 1]: 0, 1, 2, ...
    float* logits_ = nullptr;
};

}  // namespace tessera
