// tessera score: log-probabilities of given token ids, position by position.
#include <algorithm>
#include <cstdio>
#include <fmt/format.h>

#include "base/json.h"
#include "cli.h"
#include "model_options.h"
#include "model_setup.h"
#include "prompt_file.h"
#include "runner/scorer.h"
#include "subcommands.h"

namespace tessera {
namespace {

constexpr int32_t kMtpTop = 4;

struct Arguments {
    ModelSetup setup;
    std::string ids_file;
    int32_t top = 1;
    bool mtp = false;
    bool json = false;
};

std::optional<int> parse(int argc, char** argv, Arguments& arguments) {
    CLI::App app("Log-probabilities of given token ids, position by position.");
    app.name("tessera score");
    app.add_option("MODEL", arguments.setup.folder, "model folder in Hugging Face layout")->required();
    app.add_option("--ids", arguments.ids_file,
                   "JSON file: {\"ids\": [...]} or a list of such objects; - = stdin")
        ->required();
    app.add_option("--top", arguments.top, "how many most probable tokens to print for each position")
        ->check(CLI::Range(0, 1024))
        ->capture_default_str();
    app.add_flag("--mtp", arguments.mtp, "also the 4 most probable tokens of the MTP layer");
    app.add_flag("--json", arguments.json, "one JSON object a line on standard output (the only form)");
    add_model_options(app, arguments.setup);
    app.footer(
        "Row t is the distribution of token t + 1; token_logprobs[t] is about token t.\n\n"
        "examples:\n"
        "  echo '{\"ids\": [4000, 4008, 352]}' | tessera score models/demo --ids - --top 5 --json\n"
        "  tessera score models/demo --ids cases.json --top 8 --mtp --json > scores.jsonl");
    return parse_arguments(app, argc, argv);
}

void append_floats(std::string& out, const std::vector<TokenLogprob>& row) {
    out += '[';
    for (size_t i = 0; i < row.size(); ++i) {
        fmt::format_to(std::back_inserter(out), "{}{:.6f}", i == 0 ? "" : ",", row[i].logprob);
    }
    out += ']';
}

void append_ids(std::string& out, const std::vector<TokenLogprob>& row) {
    out += '[';
    for (size_t i = 0; i < row.size(); ++i) {
        fmt::format_to(std::back_inserter(out), "{}{}", i == 0 ? "" : ",", row[i].token);
    }
    out += ']';
}

// The line of one sequence, grown position by position.
class Line {
  public:
    Line(const std::vector<TokenId>& ids, const Arguments& arguments) : ids_(ids), arguments_(arguments) {}

    void visit(const Scorer::Row& row) {
        const char* separator = row.position == 0 ? "" : ",";
        const std::vector<TokenLogprob> top = top_logprobs(row.logits, arguments_.top);
        top_ids_ += separator;
        append_ids(top_ids_, top);
        top_logprobs_ += separator;
        append_floats(top_logprobs_, top);
        const auto next = static_cast<size_t>(row.position) + 1;
        if (next < ids_.size()) {
            const float logit = row.logits[static_cast<size_t>(ids_[next])];
            fmt::format_to(std::back_inserter(token_logprobs_), ",{:.6f}", logit - row.log_sum_exp);
        }
        if (!row.mtp.empty()) {
            mtp_ids_ += separator;
            append_ids(mtp_ids_, top_logprobs(row.mtp, kMtpTop));
        }
    }

    void print(size_t index) const {
        std::string line =
            fmt::format(R"({{"index":{},"token_logprobs":[{}],"top_ids":[{}],"top_logprobs":[{}])", index,
                        token_logprobs_, top_ids_, top_logprobs_);
        if (arguments_.mtp) {
            line += fmt::format(R"(,"mtp_top_ids":[{}])", mtp_ids_);
        }
        line += "}\n";
        std::fwrite(line.data(), 1, line.size(), stdout);
        std::fflush(stdout);
    }

  private:
    const std::vector<TokenId>& ids_;
    const Arguments& arguments_;
    std::string token_logprobs_ = "null", top_ids_, top_logprobs_, mtp_ids_;
};

}  // namespace

int run_score(int argc, char** argv) {
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
    Result<std::vector<std::vector<TokenId>>> sequences =
        read_id_file(arguments.ids_file, bundle->config.vocab_size);
    if (!sequences.ok()) {
        return fail(sequences.status());
    }
    size_t longest = 1;
    for (const auto& ids : *sequences) {
        longest = std::max(longest, ids.size());
    }
    if (static_cast<int64_t>(longest) > bundle->config.max_position_embeddings) {
        return fail(invalid_argument(
            fmt::format("{}: a sequence of {} tokens is longer than the model's context of {}",
                        arguments.ids_file, longest, bundle->config.max_position_embeddings)));
    }
    Result<Scorer> scorer =
        Scorer::create(*bundle->model, arguments.setup.tokens_max, static_cast<int32_t>(longest));
    if (!scorer.ok()) {
        return fail(scorer.status());
    }
    for (size_t i = 0; i < sequences->size(); ++i) {
        Line line((*sequences)[i], arguments);
        const Status status =
            scorer->run((*sequences)[i], 0, arguments.mtp, [&](const Scorer::Row& row) { line.visit(row); });
        if (!status.ok()) {
            return fail(data_loss(fmt::format("sequence {}: {}", i, status.message())));
        }
        line.print(i);
    }
    return 0;
}

}  // namespace tessera
