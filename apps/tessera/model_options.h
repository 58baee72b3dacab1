// The flags of every command that runs a model: which device, and how it computes.
#pragma once

#include "cli.h"
#include "engine_setup.h"
#include "model_setup.h"

namespace tessera {

void add_model_options(CLI::App& app, ModelSetup& setup);       // without an engine: score, eval
void add_model_options(CLI::App& app, EngineOptions& options);  // generate, chat, serve

// How large a sequence, a step and the KV pool may be: generate, chat, serve.
void add_size_options(CLI::App& app, EngineOptions& options);

}  // namespace tessera
