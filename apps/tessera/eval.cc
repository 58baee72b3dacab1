// tessera eval: exact answers on task sets, teacher-forced.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fmt/format.h>
#include <unistd.h>

#include "base/json.h"
#include "cli.h"
#include "model_options.h"
#include "model_setup.h"
#include "prompt_file.h"
#include "runner/scorer.h"
#include "subcommands.h"

namespace tessera {
namespace {

struct Arguments {
    ModelSetup setup;
    std::vector<std::string> files;
    int32_t limit = 0;
    bool mtp = false;
    bool json = false;
};

struct Case {
    std::vector<TokenId> prompt, answer;
};

struct Tally {
    int64_t cases = 0, exact = 0;
    int64_t tokens = 0, tokens_right = 0;
    int64_t drafts = 0, drafts_right = 0;
};

std::optional<int> parse(int argc, char** argv, Arguments& arguments) {
    CLI::App app(
        "Exact answers on task sets: every answer token must be the most probable one, teacher-forced.");
    app.name("tessera eval");
    app.add_option("MODEL", arguments.setup.folder, "model folder in Hugging Face layout")->required();
    app.add_option("FILE", arguments.files,
                   "task sets: .jsonl or .jsonl.gz of {\"prompt_ids\", \"answer_ids\"}")
        ->required();
    app.add_flag("--mtp", arguments.mtp,
                 "also how often the MTP layer's first draft is the answer's next token");
    app.add_option("--limit", arguments.limit, "only the first N cases of each file; 0 = all")
        ->check(CLI::Range(0, 1 << 30));
    app.add_flag("--json", arguments.json, "one JSON object a line on standard output (the only form)");
    add_model_options(app, arguments.setup);
    app.footer(
        "examples:\n"
        "  tessera eval models/demo tests/golden/data/eval_arith.jsonl --json\n"
        "  tessera eval models/demo tests/golden/data/eval_*.jsonl --mtp --json");
    return parse_arguments(app, argc, argv);
}

Result<std::vector<TokenId>> ids_member(const json::Value& object, std::string_view key, int64_t vocab_size) {
    const json::Value* list = object.find(key);
    if (list == nullptr || !list->is_array() || list->items().empty()) {
        return invalid_argument(fmt::format("{} must be a list of at least one token id", key));
    }
    return token_ids(*list, key, vocab_size);
}

Result<std::vector<Case>> read_cases(const std::string& path, const ModelConfig& config, int32_t limit) {
    Result<std::vector<std::string>> lines = read_lines(path);
    if (!lines.ok()) {
        return lines.status();
    }
    std::vector<Case> cases;
    const size_t cases_max = limit > 0 ? static_cast<size_t>(limit) : SIZE_MAX;
    for (size_t i = 0; i < lines->size() && cases.size() < cases_max; ++i) {
        if (is_blank((*lines)[i])) {
            continue;
        }
        const auto at = [&](const Status& status) {
            return invalid_argument(fmt::format("{}: line {}: {}", path, i + 1, status.message()));
        };
        Result<json::Value> object = json::parse((*lines)[i]);
        if (!object.ok()) {
            return at(object.status());
        }
        Result<std::vector<TokenId>> prompt = ids_member(*object, "prompt_ids", config.vocab_size);
        if (!prompt.ok()) {
            return at(prompt.status());
        }
        Result<std::vector<TokenId>> answer = ids_member(*object, "answer_ids", config.vocab_size);
        if (!answer.ok()) {
            return at(answer.status());
        }
        const auto length = static_cast<int64_t>(prompt->size() + answer->size());
        if (length > config.max_position_embeddings) {
            return at(invalid_argument(fmt::format("{} tokens are more than the model's context of {}",
                                                   length, config.max_position_embeddings)));
        }
        cases.push_back({prompt.take(), answer.take()});
    }
    if (cases.empty()) {
        return invalid_argument(fmt::format("{}: has no cases; at least one line is needed", path));
    }
    return cases;
}

// One prefill of prompt and answer; the distribution before each answer token is compared with it.
Status run_case(Scorer& scorer, const Case& one, bool mtp, Tally& tally) {
    std::vector<TokenId> tokens = one.prompt;
    tokens.insert(tokens.end(), one.answer.begin(), one.answer.end() - 1);
    const auto first = static_cast<int32_t>(one.prompt.size()) - 1;
    bool exact = true;
    const Status status = scorer.run(tokens, first, mtp, [&](const Scorer::Row& row) {
        const auto j = static_cast<size_t>(row.position - first);
        const bool right = argmax(row.logits) == one.answer[j];
        exact = exact && right;
        tally.tokens_right += right;
        // The MTP row at this position was fed with answer token j (the last one with the greedy token) and
        // is about answer token j + 1.
        if (mtp && j + 1 < one.answer.size()) {
            ++tally.drafts;
            tally.drafts_right += argmax(row.mtp) == one.answer[j + 1];
        }
    });
    if (!status.ok()) {
        return status;
    }
    tally.tokens += static_cast<int64_t>(one.answer.size());
    tally.exact += exact;
    ++tally.cases;
    return {};
}

double rate(int64_t part, int64_t whole) {
    return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

void print(const std::string& path, const Tally& tally, bool mtp) {
    json::Value line = json::Value::object();
    line.set("file", std::filesystem::path(path).filename().string());
    line.set("n", tally.cases);
    line.set("exact", tally.exact);
    line.set("token_rate", rate(tally.tokens_right, tally.tokens));
    if (mtp) {
        line.set("mtp_first_draft", rate(tally.drafts_right, tally.drafts));
    }
    std::puts(json::dump(line).c_str());
    std::fflush(stdout);
}

}  // namespace

int run_eval(int argc, char** argv) {
    Arguments arguments;
    if (const std::optional<int> status = parse(argc, argv, arguments)) {
        return *status;
    }
    arguments.setup.logit_rows_max = arguments.setup.tokens_max;
    Result<ModelBundle> bundle = make_model(arguments.setup);
    if (!bundle.ok()) {
        return fail(bundle.status());
    }
    if (arguments.mtp && bundle->config.num_mtp_layers == 0) {
        return fail(invalid_argument("--mtp: this model has no MTP layer (num_nextn_predict_layers is 0)"));
    }
    const bool terminal = isatty(STDERR_FILENO) != 0;
    for (const std::string& path : arguments.files) {
        Result<std::vector<Case>> cases = read_cases(path, bundle->config, arguments.limit);
        if (!cases.ok()) {
            return fail(cases.status());
        }
        size_t longest = 1;
        for (const Case& one : *cases) {
            longest = std::max(longest, one.prompt.size() + one.answer.size());
        }
        Result<Scorer> scorer =
            Scorer::create(*bundle->model, arguments.setup.tokens_max, static_cast<int32_t>(longest));
        if (!scorer.ok()) {
            return fail(scorer.status());
        }
        Tally tally;
        for (const Case& one : *cases) {
            const Status status = run_case(*scorer, one, arguments.mtp, tally);
            if (!status.ok()) {
                return fail(
                    data_loss(fmt::format("{}: case {}: {}", path, tally.cases + 1, status.message())));
            }
            if (terminal) {
                std::fprintf(stderr, "\r%s: %lld of %zu", path.c_str(), static_cast<long long>(tally.cases),
                             cases->size());
            }
        }
        if (terminal) {
            std::fputc('\n', stderr);
        }
        print(path, tally, arguments.mtp);
    }
    return 0;
}

}  // namespace tessera
