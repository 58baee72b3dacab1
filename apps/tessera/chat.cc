// tessera chat: a conversation with the model in the terminal.
#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <fmt/format.h>
#include <iostream>
#include <mutex>
#include <random>
#include <unistd.h>

#include "cli.h"
#include "engine_setup.h"
#include "model_options.h"
#include "subcommands.h"
#include "text/detokenizer.h"
#include "text/hy3_format.h"
#include "text/output_parser.h"

namespace tessera {
namespace {

volatile std::sig_atomic_t interrupted = 0;

struct Arguments {
    EngineOptions engine;
    std::string system;
    std::string effort = "no_think";
    SamplingParams sampling;
    int32_t max_tokens = 0;
    std::optional<double> temperature;
    std::optional<uint64_t> seed;
};

std::optional<int> parse(int argc, char** argv, Arguments& a) {
    CLI::App app("A conversation with the model in the terminal.");
    app.name("tessera chat");
    app.add_option("MODEL", a.engine.model, "model folder in Hugging Face layout")->required();
    app.add_option("--system", a.system, "system prompt");
    app.add_option("--reasoning-effort", a.effort, "no_think, low or high")
        ->check(CLI::IsMember({"no_think", "low", "high"}))
        ->capture_default_str();
    app.add_option("--temperature", a.temperature, "0 = the most probable token; default: the checkpoint's")
        ->check(number_range(0.0, 2.0));
    app.add_option("--seed", a.seed, "the same seed and conversation give the same answers; default: random")
        ->check(whole_number());
    app.add_option("--max-tokens", a.max_tokens, "of one answer; 0 = up to the end of the context")
        ->check(CLI::Range(0, 1 << 30));
    add_model_options(app, a.engine);
    add_size_options(app, a.engine);
    app.footer(
        "Type a line and press return. /new starts over, /effort LEVEL changes the reasoning effort, /exit "
        "or\n"
        "end-of-file leaves; Ctrl-C stops an answer.\n\n"
        "example:\n"
        "  tessera chat models/demo --reasoning-effort low");
    return parse_arguments(app, argc, argv);
}

// One answer as it comes: shown at once, kept for the history.
class Answer {
  public:
    Answer(const Tokenizer& tokenizer, OutputParserConfig config)
        : detokenizer_(tokenizer), parser_(std::move(config)), colour_(isatty(STDOUT_FILENO) != 0) {}

    // Delivery thread.
    void take(TokenEvent&& event) {
        std::lock_guard lock(mutex_);
        std::string text;
        for (const GeneratedToken& token : event.tokens) {
            text += detokenizer_.push(token.token);
        }
        show(parser_.push(text));
        if (event.finish != FinishReason::kNone) {
            show(parser_.push(detokenizer_.flush()));
            show(parser_.finish());
            finish_ = event.finish;
            error_ = event.error;
            done_.notify_all();
        }
    }

    // Cancels through `cancel` when the user presses Ctrl-C.
    void wait(const std::function<void()>& cancel) {
        std::unique_lock lock(mutex_);
        while (!done_.wait_for(lock, std::chrono::milliseconds(50),
                               [&] { return finish_ != FinishReason::kNone; })) {
            if (interrupted != 0) {
                interrupted = 0;
                lock.unlock();
                cancel();
                lock.lock();
            }
        }
        if (!error_.empty()) {
            std::fprintf(stderr, "\ntessera chat: %s", error_.c_str());
        }
        std::puts("");
    }

    json::Value message() const {
        json::Value message = json::Value::object();
        message.set("role", "assistant");
        message.set("content", content_);
        if (!reasoning_.empty()) {
            message.set("reasoning_content", reasoning_);
        }
        return message;
    }

  private:
    void show(const OutputDelta& delta) {
        if (!delta.reasoning.empty()) {
            std::fputs(colour_ ? "\033[2m" : "", stdout);
            print_text(stdout, delta.reasoning);
            std::fputs(colour_ ? "\033[0m" : "", stdout);
            reasoning_ += delta.reasoning;
        }
        if (!delta.content.empty()) {
            std::fputs(content_.empty() && !reasoning_.empty() ? "\n" : "", stdout);
            print_text(stdout, delta.content);
            content_ += delta.content;
        }
        std::fflush(stdout);
    }

    std::mutex mutex_;
    std::condition_variable done_;
    Detokenizer detokenizer_;
    OutputParser parser_;
    const bool colour_;
    std::string reasoning_, content_, error_;
    FinishReason finish_ = FinishReason::kNone;
};

class Conversation {
  public:
    Conversation(const Arguments& arguments, EngineBundle& bundle)
        : arguments_(arguments), bundle_(bundle), effort_(arguments.effort) {
        reset();
    }

    void reset() {
        messages_ = json::Value::array();
        if (!arguments_.system.empty()) {
            add("system", arguments_.system);
        }
    }

    Status set_effort(const std::string& effort) {
        if (effort != "no_think" && effort != "low" && effort != "high") {
            return invalid_argument(fmt::format("/effort {}: expected no_think, low or high", effort));
        }
        effort_ = effort;
        return {};
    }

    Status ask(const std::string& text) {
        add("user", text);
        const Status status = answer();
        if (!status.ok()) {
            messages_.items().pop_back();
        }
        return status;
    }

  private:
    void add(const char* role, const std::string& content) {
        messages_.push_back(json::Value::object({{"role", role}, {"content", content}}));
    }

    Status answer() {
        ChatInput input;
        input.messages = messages_;
        input.kwargs.set("reasoning_effort", effort_);
        input.kwargs.set("add_generation_prompt", true);
        Result<std::string> prompt = render_chat(input, bundle_.tokenizer->token_suffix());
        if (!prompt.ok()) {
            return prompt.status();
        }
        Result<std::vector<TokenId>> ids = bundle_.tokenizer->encode(*prompt);
        if (!ids.ok()) {
            return ids.status();
        }
        const auto room = bundle_.max_model_len - static_cast<int32_t>(ids->size());
        if (room < 1) {
            return invalid_argument(fmt::format(
                "the conversation fills the context of {} tokens: /new starts over", bundle_.max_model_len));
        }
        Request request;
        request.id = bundle_.engine->new_request_id();
        request.prompt = ids.take();
        request.sampling = arguments_.sampling;
        request.sampling.max_tokens =
            arguments_.max_tokens > 0 ? std::min(arguments_.max_tokens, room) : room;
        OutputParserConfig parser;
        parser.suffix = bundle_.tokenizer->token_suffix();
        parser.start = output_start(*prompt, parser.suffix);
        auto answer = std::make_shared<Answer>(*bundle_.tokenizer, std::move(parser));
        const RequestId id = request.id;
        interrupted = 0;
        const Status status = bundle_.engine->submit(
            std::move(request), [answer](TokenEvent&& event) { answer->take(std::move(event)); });
        if (status.ok()) {
            answer->wait([&] { bundle_.engine->cancel(id); });
            messages_.push_back(answer->message());
        }
        return status;
    }

    const Arguments& arguments_;
    EngineBundle& bundle_;
    std::string effort_;
    json::Value messages_;
};

void run_lines(Conversation& conversation) {
    const bool terminal = isatty(STDIN_FILENO) != 0;
    // "/word", and what follows it; a path is text.
    const auto names_command = [](std::string_view text) {
        const size_t end = std::min(text.find(' '), text.size());
        return end > 1 && text[0] == '/' &&
               std::ranges::all_of(text.substr(1, end - 1), [](char c) { return c >= 'a' && c <= 'z'; });
    };
    std::string line;
    for (;;) {
        if (terminal) {
            std::fputs("> ", stdout);
            std::fflush(stdout);
        }
        if (!std::getline(std::cin, line) || line == "/exit") {
            return;
        }
        Status status;
        if (line == "/new") {
            conversation.reset();
        } else if (line.starts_with("/effort ")) {
            status = conversation.set_effort(line.substr(8));
        } else if (names_command(line)) {
            status = invalid_argument(fmt::format("{}: no such command: /new, /effort LEVEL, /exit", line));
        } else if (!line.empty()) {
            status = conversation.ask(line);
        }
        if (!status.ok()) {
            std::fprintf(stderr, "tessera chat: %s\n", status.message().c_str());
        }
    }
}

}  // namespace

int run_chat(int argc, char** argv) {
    Arguments arguments;
    if (const std::optional<int> status = parse(argc, argv, arguments)) {
        return *status;
    }
    arguments.engine.progress = true;
    arguments.engine.max_num_seqs = 1;
    Result<EngineBundle> bundle = make_engine(arguments.engine);
    if (!bundle.ok()) {
        return fail(bundle.status());
    }
    const GenerationDefaults& defaults = bundle->generation;
    arguments.sampling.seed = arguments.seed ? *arguments.seed : std::random_device()();
    arguments.sampling.temperature = arguments.temperature.value_or(defaults.temperature);
    arguments.sampling.top_p = defaults.top_p;
    arguments.sampling.top_k = defaults.top_k;
    arguments.sampling.min_p = defaults.min_p;
    arguments.sampling.repetition_penalty = defaults.repetition_penalty;
    std::signal(SIGINT, [](int) { interrupted = 1; });
    Conversation conversation(arguments, *bundle);
    run_lines(conversation);
    return 0;
}

}  // namespace tessera
