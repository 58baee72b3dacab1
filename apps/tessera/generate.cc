// tessera generate: completes prompts offline, all of them in one batch.
#include <condition_variable>
#include <cstdio>
#include <fmt/format.h>
#include <mutex>
#include <unistd.h>

#include "base/json.h"
#include "cli.h"
#include "engine_setup.h"
#include "model_options.h"
#include "prompt_file.h"
#include "subcommands.h"
#include "text/detokenizer.h"

namespace tessera {
namespace {

struct Arguments {
    EngineOptions engine;
    std::string prompt, ids_file;
    int32_t max_tokens = 0;
    SamplingParams sampling{.temperature = 0};
    bool json = false;
    bool keep_special = false;
};

std::optional<int> parse(int argc, char** argv, Arguments& a) {
    CLI::App app(
        "Completes prompts (plain text or token ids, no chat format) and prints what the model adds.");
    app.name("tessera generate");
    app.add_option("MODEL", a.engine.model, "model folder in Hugging Face layout")->required();
    auto* prompt = app.add_option("--prompt", a.prompt, "the text to complete");
    app.add_option("--prompt-ids", a.ids_file,
                   "JSON file: {\"ids\": [...]} or a list of such objects; - = stdin")
        ->excludes(prompt);
    app.add_option("--max-tokens", a.max_tokens, "0 = up to the end of the context")
        ->check(CLI::Range(0, 1 << 30));
    app.add_option("--temperature", a.sampling.temperature, "0 = the most probable token each time")
        ->check(number_range(0.0, 2.0))
        ->capture_default_str();
    app.add_option("--top-k", a.sampling.top_k, "0 = off")->check(CLI::Range(0, 1 << 30));
    app.add_option("--top-p", a.sampling.top_p, "in (0, 1]")->check(number_range(1e-9, 1.0));
    app.add_option("--min-p", a.sampling.min_p, "in [0, 1]")->check(number_range(0.0, 1.0));
    app.add_option("--seed", a.sampling.seed, "the same seed gives the same tokens")->check(whole_number());
    app.add_flag("--ignore-eos", a.sampling.ignore_eos, "go on past the end token");
    app.add_flag("--keep-special-tokens", a.keep_special, "show special tokens in the text");
    app.add_flag("--json", a.json, "one JSON object a line, in input order");
    add_model_options(app, a.engine);
    add_size_options(app, a.engine);
    app.footer(
        "examples:\n"
        "  tessera generate models/demo --prompt 'Once upon a time' --max-tokens 40\n"
        "  tessera generate models/demo --prompt-ids prompts.json --temperature 0.9 --seed 7 --json");
    const std::optional<int> status = parse_arguments(app, argc, argv);
    if (!status && a.prompt.empty() && a.ids_file.empty()) {
        std::fprintf(stderr, app.count("--prompt") > 0
                                 ? "tessera generate: --prompt is empty: give it some text, or --prompt-ids\n"
                                 : "tessera generate: --prompt or --prompt-ids is required\n");
        return 2;
    }
    return status;
}

// The outputs of all prompts, filled by the delivery thread.
class Outputs {
  public:
    struct Output {
        std::vector<TokenId> ids;
        std::string error;
        FinishReason finish = FinishReason::kNone;
        int32_t prompt_tokens = 0, cached_tokens = 0;
    };

    Outputs(size_t count, const Tokenizer& tokenizer, const Arguments& arguments)
        : outputs_(count),
          live_(tokenizer, !arguments.keep_special),
          show_live_(!arguments.json && count == 1) {}

    void take(size_t index, TokenEvent&& event) {
        std::lock_guard lock(mutex_);
        Output& output = outputs_[index];
        for (const GeneratedToken& token : event.tokens) {
            output.ids.push_back(token.token);
            if (show_live_) {
                print_text(stdout, live_.push(token.token));
                std::fflush(stdout);
            }
        }
        if (event.finish != FinishReason::kNone) {
            output.finish = event.finish;
            output.error = std::move(event.error);
            output.prompt_tokens = event.prompt_tokens;
            output.cached_tokens = event.cached_tokens;
            done_.notify_all();
        }
    }

    void refuse(size_t index, const Status& status) {
        std::lock_guard lock(mutex_);
        outputs_[index].finish = FinishReason::kError;
        outputs_[index].error = status.message();
    }

    // Waits until the output is complete.
    const Output& wait(size_t index) {
        std::unique_lock lock(mutex_);
        done_.wait(lock, [&] { return outputs_[index].finish != FinishReason::kNone; });
        return outputs_[index];
    }

    bool shown_live() const { return show_live_; }

  private:
    std::mutex mutex_;
    std::condition_variable done_;
    std::vector<Output> outputs_;
    Detokenizer live_;
    const bool show_live_;
};

void print_json(size_t index, const Outputs::Output& output, const std::string& text) {
    json::Value line = json::Value::object();
    line.set("index", static_cast<int64_t>(index));
    json::Value ids = json::Value::array();
    for (const TokenId id : output.ids) {
        ids.push_back(id);
    }
    line.set("ids", std::move(ids));
    line.set("text", text);
    line.set("finish_reason", finish_reason_name(output.finish));
    line.set("prompt_tokens", output.prompt_tokens);
    line.set("cached_tokens", output.cached_tokens);
    if (!output.error.empty()) {
        line.set("error", output.error);
    }
    std::puts(json::dump(line).c_str());
    std::fflush(stdout);
}

Result<std::vector<std::vector<TokenId>>> read_prompts(const Arguments& arguments,
                                                       const EngineBundle& bundle) {
    if (!arguments.ids_file.empty()) {
        return read_id_file(arguments.ids_file, bundle.config.vocab_size);
    }
    Result<std::vector<TokenId>> ids = bundle.tokenizer->encode(arguments.prompt);
    if (!ids.ok()) {
        return ids.status();
    }
    return std::vector<std::vector<TokenId>>{ids.take()};
}

// The finish reason kError of any prompt makes the exit status 1.
int print_all(Outputs& outputs, size_t count, const Arguments& arguments, const Tokenizer& tokenizer) {
    int status = 0;
    for (size_t i = 0; i < count; ++i) {
        const Outputs::Output& output = outputs.wait(i);
        const std::string text = tokenizer.decode(output.ids, !arguments.keep_special);
        if (arguments.json) {
            print_json(i, output, text);
        } else if (!outputs.shown_live()) {
            print_text(stdout, text + "\n");
        } else {
            std::fputc('\n', stdout);
        }
        if (output.finish == FinishReason::kError) {
            print_text(stderr, fmt::format("tessera generate: prompt {}: {}\n", i, output.error));
            status = 1;
        }
    }
    return status;
}

}  // namespace

int run_generate(int argc, char** argv) {
    Arguments arguments;
    if (const std::optional<int> status = parse(argc, argv, arguments)) {
        return *status;
    }
    arguments.engine.progress = true;
    arguments.engine.max_queued_requests = 0;  // a file is bounded by itself
    Result<EngineBundle> bundle = make_engine(arguments.engine);
    if (!bundle.ok()) {
        return fail(bundle.status());
    }
    Result<std::vector<std::vector<TokenId>>> prompts = read_prompts(arguments, *bundle);
    if (!prompts.ok()) {
        return fail(prompts.status());
    }
    Engine& engine = *bundle->engine;
    Outputs outputs(prompts->size(), *bundle->tokenizer, arguments);
    for (size_t i = 0; i < prompts->size(); ++i) {
        Request request;
        request.id = engine.new_request_id();
        request.prompt = (*prompts)[i];
        request.sampling = arguments.sampling;
        request.sampling.seed = arguments.sampling.seed + i;
        const auto room = bundle->max_model_len - static_cast<int32_t>(request.prompt.size());
        request.sampling.max_tokens = arguments.max_tokens > 0 ? std::min(arguments.max_tokens, room) : room;
        if (room < 1) {
            outputs.refuse(i, invalid_argument(fmt::format("the prompt's {} tokens fill the context of {}",
                                                           request.prompt.size(), bundle->max_model_len)));
            continue;
        }
        const Status status = engine.submit(
            std::move(request), [&outputs, i](TokenEvent&& event) { outputs.take(i, std::move(event)); });
        if (!status.ok()) {
            outputs.refuse(i, status);
        }
    }
    return print_all(outputs, prompts->size(), arguments, *bundle->tokenizer);
}

}  // namespace tessera
