// tessera quantize: a model folder -> the same model in the official FP8 release's format, with static scales
// measured on a calibration file.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <fmt/format.h>
#include <functional>
#include <memory>
#include <unistd.h>

#include "base/clock.h"
#include "calibration_file.h"
#include "cli.h"
#include "model/hy3_model.h"
#include "model_setup.h"
#include "runner/scorer.h"
#include "signals.h"
#include "subcommands.h"
#include "text/tokenizer.h"
#include "weights/export_folder.h"
#include "weights/fp8_export.h"
#include "weights/loader.h"
#include "weights/w4a8_export.h"

namespace tessera {
namespace {

constexpr int32_t kChunkTokens = 512;
constexpr size_t kFewTokens = 4096;  // too little to find the magnitudes that matter

struct Arguments {
    std::string model, out, calibration;
    std::string scheme;
    CalibrationLimits limits{.samples_max = 512, .tokens_max = 2048};
    double percentile = 100;
    double shard_gb = 5;
    int32_t threads = 0;
};

std::optional<int> parse(int argc, char** argv, Arguments& a) {
    CLI::App app(
        "Writes a model in a quantised form.\n"
        "fp8: the official FP8 release's format: e4m3 projections with a scale for each weight, and static\n"
        "scales of every projection's input, of K and of V, measured while the model reads a calibration\n"
        "file. Routers, norms, the embedding, lm_head and eh_proj stay as they are.\n"
        "w4a8: routed experts in int4 with a scale for each 128 inputs, each weight rounded to the nearest\n"
        "code, for e4m3 activations with a scale for each token; nothing is measured, and the rest stays as\n"
        "it is. The format of llm-compressor (compressed-tensors, pack-quantized).");
    app.name("tessera quantize");
    app.add_option("MODEL", a.model, "model folder in Hugging Face layout, not yet quantised")->required();
    app.add_option("OUT", a.out, "the folder to make; it must not exist")->required();
    app.add_option("--scheme", a.scheme, "fp8 or w4a8")->required()->check(CLI::IsMember({"fp8", "w4a8"}));
    app.add_option("--calibration", a.calibration,
                   "samples to measure on: .jsonl or .jsonl.gz (see below); fp8 only, and needed there");
    app.add_option("--samples", a.limits.samples_max, "the first samples of the file that are used")
        ->check(CLI::Range(1, 1 << 24))
        ->capture_default_str();
    app.add_option("--max-length", a.limits.tokens_max, "tokens of a sample; what is longer is cut")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    app.add_option("--percentile", a.percentile,
                   "per cent of the observed magnitudes that an input's scale holds unclipped; 100 = all")
        ->check(number_range(50.0, 100.0))
        ->capture_default_str();
    app.add_option("--shard-size", a.shard_gb, "GB of weights in a file")
        ->check(number_range(0.001, 1000.0))
        ->capture_default_str();
    app.add_option("--threads", a.threads, "0 = all the cores that the process may use")
        ->check(CLI::Range(0, 1024));
    app.footer(
        "A line of the calibration file is one sample: {\"text\": TEXT}, {\"ids\": [...]} or\n"
        "{\"messages\": [...], \"tools\"?, \"kwargs\"?} (a conversation as a chat request has it).\n"
        "Take texts like those that the model will see, and none that it will be judged by: a few hundred\n"
        "samples are enough.\n\n"
        "example:\n"
        "  tessera quantize models/demo demo-fp8 --scheme fp8 --calibration models/demo/calibration.jsonl\n"
        "  tessera quantize models/demo demo-w4a8 --scheme w4a8");
    if (const std::optional<int> status = parse_arguments(app, argc, argv)) {
        return status;
    }
    if (a.scheme == "fp8" && a.calibration.empty()) {
        std::fprintf(stderr, "tessera quantize: --scheme fp8 needs --calibration\n");
        return 2;
    }
    for (const char* flag : {"--calibration", "--samples", "--max-length", "--percentile"}) {
        if (a.scheme == "w4a8" && app.count(flag) > 0) {
            std::fprintf(stderr, "tessera quantize: --scheme w4a8 measures nothing: leave out %s\n", flag);
            return 2;
        }
    }
    return std::nullopt;
}

// A line on a terminal that is written over; elsewhere a line a tenth of the way.
class Progress {
  public:
    explicit Progress(std::string_view what) : what_(what), terminal_(isatty(STDERR_FILENO) != 0) {}
    void show(int64_t done, int64_t total) {
        const auto percent = static_cast<int>(100 * done / std::max<int64_t>(total, 1));
        if (percent == shown_ || (!terminal_ && percent / 10 == shown_ / 10 && shown_ >= 0)) {
            return;
        }
        shown_ = percent;
        std::fprintf(stderr, "%s%s: %3d %%%s", terminal_ ? "\r" : "", what_.c_str(), percent,
                     !terminal_ || done >= total ? "\n" : "");
    }

  private:
    const std::string what_;
    const bool terminal_;
    int shown_ = -1;
};

// Reads the samples; the MTP layer reads them too, each position with the token that really follows.
Status observe(const LoadedModel& loaded, const std::vector<std::vector<TokenId>>& samples, ThreadPool& pool,
               ActivationObserver& observer) {
    Result<std::unique_ptr<Hy3Model>> model = Hy3Model::create(
        loaded.config, loaded.weights,
        {.tokens_max = kChunkTokens, .logit_rows_max = kChunkTokens, .observer = &observer}, pool);
    if (!model.ok()) {
        return model.status();
    }
    const auto longest = std::max_element(samples.begin(), samples.end(),
                                          [](const auto& a, const auto& b) { return a.size() < b.size(); });
    Result<Scorer> scorer = Scorer::create(**model, kChunkTokens, static_cast<int32_t>(longest->size()));
    if (!scorer.ok()) {
        return scorer.status();
    }
    Progress progress("observing activations");
    for (size_t i = 0; i < samples.size(); ++i) {
        progress.show(static_cast<int64_t>(i), static_cast<int64_t>(samples.size()));
        const Status status = scorer->run(samples[i], static_cast<int32_t>(samples[i].size()),
                                          loaded.config.num_mtp_layers > 0, [](const Scorer::Row&) {});
        if (!status.ok()) {
            return status;
        }
    }
    progress.show(1, 1);
    return {};
}

// Inputs of linears may be clipped at a percentile; K and V never are.
Result<std::vector<LayerLimits>> layer_limits(const ActivationObserver& observer, double percentile) {
    std::vector<LayerLimits> limits;
    for (const LayerMagnitudes& layer : observer.layers) {
        for (const Magnitudes* seen :
             {&layer.attention_input, &layer.output_input, &layer.key, &layer.value, &layer.mlp_input,
              &layer.expert_down_input, &layer.shared_down_input}) {
            if (!seen->finite()) {
                return invalid_argument(fmt::format(
                    "layer {}: an activation is not finite: the model or a sample is broken", limits.size()));
            }
        }
        const auto quantile = [&](const Magnitudes& seen) { return seen.quantile(percentile / 100); };
        limits.push_back({.attention_input = quantile(layer.attention_input),
                          .output_input = quantile(layer.output_input),
                          .key = layer.key.largest(),
                          .value = layer.value.largest(),
                          .mlp_input = quantile(layer.mlp_input),
                          .expert_down_input = quantile(layer.expert_down_input),
                          .shared_down_input = quantile(layer.shared_down_input)});
    }
    return limits;
}

void warn_of_few(const std::vector<std::vector<TokenId>>& samples) {
    size_t tokens = 0;
    for (const std::vector<TokenId>& sample : samples) {
        tokens += sample.size();
    }
    if (tokens < kFewTokens) {
        std::fprintf(stderr,
                     "warning: %zu samples of %zu tokens in all are few: what they do not show is clipped; a "
                     "few hundred samples are usual\n",
                     samples.size(), tokens);
    }
}

Result<LoadedModel> load(const Arguments& arguments) {
    Progress loading("loading weights");
    // Any loading thread reports, so only the last report is shown.
    const auto show_end = [&](int64_t done, int64_t total) {
        if (done >= total) {
            loading.show(done, total);
        }
    };
    return load_model(arguments.model, {.threads = resolve_threads(arguments.threads), .progress = show_end});
}

// Shows how much is written, and stops the writer at a signal.
std::function<bool(int64_t, int64_t)> show_until_signal(Progress& writing, const Interrupts& interrupts) {
    return [&](int64_t done, int64_t total) {
        writing.show(done, total);
        return interrupts.noted() == 0;
    };
}

// Makes a folder and removes it again, so that no signal may come between.
Status check_out(const Arguments& arguments, Interrupts& interrupts) {
    const Interrupts::Writing trial(interrupts);
    const Status status = check_export_folder(arguments.out);
    return interrupts.noted() != 0 ? Status(StatusCode::kCancelled, "interrupted") : status;
}

Status quantize_w4a8(const Arguments& arguments, Interrupts& interrupts) {
    const TimeNs started = now_ns();
    // All that can be wrong without the weights comes before them: a large model loads for minutes.
    if (Status status = check_out(arguments, interrupts); !status.ok()) {
        return status;
    }
    const Result<LoadedModel> loaded = load(arguments);
    if (!loaded.ok()) {
        return loaded.status();
    }
    ThreadPool pool(resolve_threads(arguments.threads));
    Progress writing("writing weights");
    const Interrupts::Writing begun(interrupts);
    const Status status = export_w4a8(*loaded,
                                      {.shard_bytes_max = static_cast<int64_t>(arguments.shard_gb * 1e9),
                                       .progress = show_until_signal(writing, interrupts)},
                                      arguments.out, pool);
    if (status.ok()) {
        std::fprintf(stderr, "%s: %.1f s\n", arguments.out.c_str(), seconds(now_ns() - started));
    }
    return status;
}

Status quantize_fp8(const Arguments& arguments, Interrupts& interrupts) {
    const TimeNs started = now_ns();
    Result<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::load(arguments.model);
    if (!tokenizer.ok()) {
        return tokenizer.status();
    }
    // All that can be wrong without the weights comes before them: a large model loads for minutes.
    if (Status status = check_out(arguments, interrupts); !status.ok()) {
        return status;
    }
    const Result<ModelConfig> config = load_model_config(arguments.model);
    if (!config.ok()) {
        return config.status();
    }
    CalibrationLimits limits = arguments.limits;
    limits.tokens_max =
        static_cast<int32_t>(std::min<int64_t>(limits.tokens_max, config->max_position_embeddings));
    const Result<std::vector<std::vector<TokenId>>> samples =
        read_calibration(arguments.calibration, **tokenizer, config->vocab_size, limits);
    if (!samples.ok()) {
        return samples.status();
    }
    warn_of_few(*samples);
    Result<LoadedModel> loaded = load(arguments);
    if (!loaded.ok()) {
        return loaded.status();
    }
    {
        const Interrupts::Writing trial(interrupts);
        if (Status status = check_fp8_export(*loaded, arguments.out); !status.ok()) {
            return status;
        }
    }
    ThreadPool pool(resolve_threads(arguments.threads));
    auto observer = std::make_unique<ActivationObserver>();
    if (Status status = observe(*loaded, *samples, pool, *observer); !status.ok()) {
        return status;
    }
    const Result<std::vector<LayerLimits>> measured = layer_limits(*observer, arguments.percentile);
    if (!measured.ok()) {
        return measured.status();
    }
    Progress writing("writing weights");
    const Interrupts::Writing begun(interrupts);
    const Status status = export_fp8(*loaded,
                                     {.layers = *measured,
                                      .shard_bytes_max = static_cast<int64_t>(arguments.shard_gb * 1e9),
                                      .progress = show_until_signal(writing, interrupts)},
                                     arguments.out, pool);
    if (status.ok()) {
        std::fprintf(stderr, "%s: %zu samples, %.1f s\n", arguments.out.c_str(), samples->size(),
                     seconds(now_ns() - started));
    }
    return status;
}

}  // namespace

int run_quantize(int argc, char** argv) {
    Arguments arguments;
    if (const std::optional<int> status = parse(argc, argv, arguments)) {
        return *status;
    }
    std::signal(SIGXFSZ, SIG_IGN);  // a file over the limit is a failed write, and what was made is removed
    Interrupts interrupts;
    const Status status = arguments.scheme == "fp8" ? quantize_fp8(arguments, interrupts)
                                                    : quantize_w4a8(arguments, interrupts);
    if (!status.ok()) {
        const int failed = fail(status);
        return interrupts.noted() != 0 ? 128 + interrupts.noted() : failed;
    }
    return 0;
}

}  // namespace tessera
