// The flags of every command that runs a model without an engine (score, eval).
#pragma once

#include "cli.h"
#include "model_setup.h"

namespace tessera {

void add_model_options(CLI::App& app, ModelSetup& setup);

}  // namespace tessera
