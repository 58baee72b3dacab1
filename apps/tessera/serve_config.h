// The command line of `tessera serve`: vLLM's flag names, with SGLang's spelling of some as aliases.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/log.h"
#include "engine_setup.h"
#include "server/http.h"

namespace tessera {

struct ServeConfig {
    EngineOptions engine;
    HttpServerConfig http;
    std::vector<std::string> served_model_names;  // at least one after parsing
    bool authors_sampling_defaults = true;        // generation_config.json, not --generation-config vllm
    json::Value chat_template_kwargs = json::Value::object();
    bool share_cache_between_keys = false;
    bool force_include_usage = false;
    std::optional<int64_t> seed;
    double request_timeout_s = 0;    // 0 = none
    double shutdown_timeout_s = 20;  // fits in the 30 s that Kubernetes gives before it kills
    LogLevel log_level = LogLevel::kInfo;
    bool print_config = false;
};

// Parses and checks; on a wrong usage it prints what is wrong, and after --help the help. Returns the exit
// status to end with, or nothing: go on. Reads the key file and the environment's keys.
std::optional<int> parse_serve(int argc, char** argv, ServeConfig& config);

// The resolved values as one JSON object. API keys show as their number alone.
std::string serve_config_json(const ServeConfig& config);

}  // namespace tessera
