// tessera bench engine: prefill and decode of the model without a server, each beside the floor that the
// machine sets. The command line; bench_engine_cpu.cc and cuda/bench_engine_device.cc measure.
#include "bench_engine.h"

#include <algorithm>
#include <cstdio>
#include <optional>

#include "bench.h"
#include "cli.h"
#include "model_configs.h"
#include "model_options.h"

namespace tessera {
namespace {

constexpr std::string_view kFooter =
    "Decode steps include greedy sampling; the context grows by one a step, centred on --context.\n"
    "The floor counts the weights of the experts that the steps really touched, the KV cache, and\n"
    "attention.\n\n"
    "On CUDA the engine's own runner is driven: decode steps are replayed graphs over a KV cache of\n"
    "random content, prefill runs in chunks, and each operator's time stands beside its own floor.\n"
    "--model-config takes the sizes of a model without its weights, which are then drawn on the\n"
    "device.\n\n"
    "examples:\n"
    "  tessera bench engine models/demo\n"
    "  tessera bench engine models/demo --batch 1,4,16 --context 1024 --json\n"
    "  tessera bench engine models/demo --device cuda\n"
    "  tessera bench engine --device cuda --model-config hy3 --layers 8 --random-weights --dtype fp8 "
    "--kv-cache-dtype fp8";

void add_options(CLI::App& app, BenchEngineArguments& arguments, bool& random_weights) {
    ModelSetup& setup = arguments.setup;
    app.add_option("MODEL", setup.folder, "model folder in Hugging Face layout");
    add_model_options(app, setup);
    app.add_option("--model-config", arguments.model_config,
                   "instead of MODEL: hy3, or the path of a config.json");
    app.add_option("--layers", arguments.layers,
                   "the first N layers of --model-config, without the MTP layer")
        ->check(CLI::Range(1, 1024));
    app.add_flag("--random-weights", random_weights,
                 "what --model-config needs: weights drawn on the device");
    app.add_option("--dtype", arguments.dtype, "of the random weights: bf16 (the default) or fp8")
        ->check(CLI::IsMember({"bf16", "fp8"}));
    app.add_option("--prompt-tokens", arguments.prompt_tokens,
                   "lengths of the prompts that prefill is timed on (cpu: 2048; cuda: 2048,8192,32768,65536)")
        ->check(CLI::Range(1, 1 << 20))
        ->delimiter(',');
    app.add_option("--context", arguments.contexts,
                   "tokens before each decoded one, on the average (cpu: 128; cuda: 4096,32768)")
        ->check(CLI::Range(1, 1 << 20))
        ->delimiter(',');
    app.add_option("--batch", arguments.batches,
                   "sequences decoded together (cpu: 1,16; cuda: 1,4,16,64,128)")
        ->check(CLI::Range(1, 1024))
        ->delimiter(',');
    app.add_option("--max-num-batched-tokens", setup.tokens_max,
                   "prefill runs in chunks of this many tokens (cpu: 512; cuda: 8192)")
        ->check(CLI::Range(16, 1 << 20));
    app.add_option("--steps", arguments.steps, "decode steps in a round")
        ->check(CLI::Range(1, 100'000))
        ->capture_default_str();
    app.add_option("--rounds", arguments.rounds,
                   "cpu: the best round counts; cuda: the median of a prefill's rounds")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    app.add_flag("--json", arguments.json,
                 "one JSON object a line on standard output; the table goes to standard error");
    app.footer(std::string(kFooter));
}

// What was not given.
void set_defaults(BenchEngineArguments& arguments) {
    const bool cuda = arguments.setup.device == "cuda";
    const auto unless_given = [](std::vector<int32_t>& values, std::vector<int32_t> defaults) {
        if (values.empty()) {
            values = std::move(defaults);
        }
    };
    unless_given(arguments.prompt_tokens, cuda ? std::vector{2048, 8192, 32768, 65536} : std::vector{2048});
    unless_given(arguments.contexts, cuda ? std::vector{4096, 32768} : std::vector{128});
    unless_given(arguments.batches, cuda ? std::vector{1, 4, 16, 64, 128} : std::vector{1, 16});
    ModelSetup& setup = arguments.setup;
    if (setup.tokens_max == 0) {
        setup.tokens_max = cuda ? 8192 : 512;
    }
    setup.logit_rows_max = *std::ranges::max_element(arguments.batches);
    setup.sequences_max = setup.logit_rows_max;
    setup.tokens_max = std::max(setup.tokens_max, setup.logit_rows_max);
}

// What is wrong with the flags beside each other, or nullptr.
const char* flag_mistake(const BenchEngineArguments& arguments, bool random_weights) {
    const bool config = !arguments.model_config.empty();
    if (config == !arguments.setup.folder.empty()) {
        return "give either MODEL or --model-config";
    }
    if (config != random_weights) {
        return config ? "--model-config has no weights: add --random-weights"
                      : "--random-weights needs --model-config";
    }
    if (config && arguments.setup.device != "cuda") {
        return "--model-config needs --device cuda";
    }
    if (!config && (arguments.layers != 0 || !arguments.dtype.empty())) {
        return "--layers and --dtype need --model-config: a folder has its own";
    }
    return nullptr;
}

// What can be wrong without the device comes before it.
Status check_model(const BenchEngineArguments& arguments) {
    const bool config = !arguments.model_config.empty();
    if (const Result<DType> kv_dtype = parse_kv_dtype(arguments.setup.device, arguments.setup.kv_cache_dtype);
        !kv_dtype.ok()) {
        return kv_dtype.status();
    }
    Result<ModelConfig> whole =
        config ? find_model_config(arguments.model_config) : load_model_config(arguments.setup.folder);
    return whole.ok() && config ? with_layers(whole.take(), arguments.layers).status() : whole.status();
}

}  // namespace

int64_t BenchEngineArguments::longest_sequence() const {
    return std::max(*std::ranges::max_element(contexts) + steps, *std::ranges::max_element(prompt_tokens));
}

int run_bench_engine(int argc, char** argv) {
    BenchEngineArguments arguments;
    arguments.started = now_ns();
    arguments.setup.tokens_max = 0;
    bool random_weights = false;
    CLI::App app("Prefill and decode of the model without a server, beside this machine's floor.");
    app.name("tessera bench engine");
    add_options(app, arguments, random_weights);
    if (const std::optional<int> status = parse_arguments(app, argc, argv)) {
        return *status;
    }
    if (const char* mistake = flag_mistake(arguments, random_weights)) {
        std::fprintf(stderr, "tessera bench engine: %s\n", mistake);
        return 2;
    }
    set_defaults(arguments);
    Status status = check_model(arguments);
    if (status.ok()) {
        status = arguments.setup.device == "cuda" ? bench_engine_on_device(arguments)
                                                  : bench_engine_on_cpu(arguments);
    }
    return status.ok() ? 0 : fail(status);
}

}  // namespace tessera
