// moe: y += sum over the chosen experts of w * down(silu(gate x) * up x), + the shared expert. Without routed
// experts it is a dense SwiGLU layer.
//
// A token's sum starts at zero, adds its experts in ascending order and the shared expert last, and is then
// added to y, all in float32: its bits depend on neither the batch nor the threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "device/host_buffer.h"
#include "ops/common/packed_matrix.h"
#include "ops/op_context.h"

namespace tessera {

struct ExpertWeights {
    // Panels alternate gate and up: panel 2 p holds gate outputs 16 p .., panel 2 p + 1 the up outputs of the
    // same.
    PackedMatrix gate_up;  // inputs = hidden, outputs = 2 * width (padded to 16)
    PackedMatrix down;     // inputs = width, outputs = hidden

    int64_t padded_width() const { return gate_up.outputs / 2; }  // a multiple of 16; the padding is zero
};

struct MoeShape {
    int64_t tokens_max = 0;
    int64_t experts = 0;
    int64_t k = 0;
    int64_t width = 0;         // of a routed expert
    int64_t shared_width = 0;  // of the shared expert (or the dense layer); 0 = none
};

// The memory that moe() needs, allocated once. One owner; not shared by concurrent calls.
class MoeWorkspace {
  public:
    static Result<MoeWorkspace> create(const MoeShape& shape);

    // What the last moe() gave to the down projections: [tokens * k rows of all experts, padded width], then
    // the shared expert's [tokens, padded width].
    const float* hidden() const { return hidden_.as<float>(); }

  private:
    friend class MoeRun;
    explicit MoeWorkspace(const MoeShape& shape);
    // `rows` rows of expert `expert` (shared = experts), from `row` of its list on, and one block of outputs.
    struct Item {
        int32_t expert = 0;
        int32_t row = 0;
        int32_t rows = 0;
        int32_t block = 0;
    };
    int64_t tokens_max_ = 0;
    std::vector<int32_t> first_;   // [experts + 1]: where an expert's rows begin
    std::vector<int32_t> active_;  // the experts that have rows, ascending
    std::vector<int32_t> tokens_;  // [rows]: the token of each row, ascending within an expert
    std::vector<float> weights_;   // [rows]
    std::vector<Item> items_;
    HostBuffer hidden_;  // [rows, width] of the routed experts, then [tokens, shared_width]
    int64_t hidden_floats_ = 0;
};

struct MoeArgs {
    const float* x = nullptr;  // [tokens, hidden]
    int64_t x_stride = 0;      // floats between rows
    int64_t tokens = 0;        // <= tokens_max of the workspace
    int64_t hidden = 0;
    std::span<const ExpertWeights> experts;  // all of one width
    int64_t k = 0;                           // 0 without routed experts
    const int32_t* chosen = nullptr;         // [tokens, k], ascending
    const float* weights = nullptr;          // [tokens, k]
    const ExpertWeights* shared = nullptr;   // may be null
    float* y = nullptr;                      // [tokens, hidden]
    int64_t y_stride = 0;
    MoeWorkspace* workspace = nullptr;
};

void moe(const OpContext& context, const MoeArgs& args);
void moe_ref(const MoeArgs& args);  // uses no workspace

}  // namespace tessera
