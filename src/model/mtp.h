// The multi-token-prediction layer's input: u = eh_proj([norm(embed(t + 1)), norm(hidden of t)]).
#pragma once

#include <span>

#include "model/packed_weights.h"
#include "model/step.h"

namespace tessera {

// residual = u for every entry. The rest of the layer is an ordinary block (block.h) on the pages' last
// layer. hidden: [T, hidden] final-normed states.
void mtp_input(Step& step, const PackedModel& model, const float* hidden,
               std::span<const TokenId> next_tokens);

}  // namespace tessera
