#include "sim/workload.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "base/check.h"

namespace tessera::sim {
namespace {

constexpr int32_t kTextTokens = 420;

// Milliseconds: 1 a decode row, 0.1 a prefill token, and the context.
double step_seconds(const StepShape& shape) {
    return 1e-3 * shape.decode_rows + 1e-4 * shape.prefill_tokens +
           1e-6 * static_cast<double>(shape.context_tokens);
}

int32_t pages_of(int32_t tokens) {
    return static_cast<int32_t>((tokens + kPageTokens - 1) / kPageTokens);
}

}  // namespace

Setting random_setting(Random& random) {
    Setting setting;
    SchedulerConfig& scheduler = setting.scheduler;
    scheduler.max_num_seqs = random.between(1, 8);
    scheduler.max_model_len = random.one_in(4) ? random.between(2, 130) : random.between(131, 500);
    scheduler.steps_in_flight = random.one_in(4) ? random.between(1, 3) : 2;
    scheduler.draft_tokens_max = random.one_in(2) ? 0 : random.between(1, 3);
    scheduler.eos_ids = {kEos};
    const int32_t decode_tokens = scheduler.max_num_seqs * (1 + scheduler.draft_tokens_max);
    const int32_t pages_each = pages_of(scheduler.max_model_len);
    setting.long_answers = random.one_in(2);
    setting.ample = random.one_in(4);
    if (setting.ample) {
        setting.pages = scheduler.max_num_seqs * (pages_each + 1);
        scheduler.max_num_batched_tokens = 2 * decode_tokens + random.between(0, 300);
    } else {
        const bool tight = random.one_in(2);
        setting.pages = tight ? pages_each + random.between(0, 3) : random.between(1, 3 * pages_each + 2);
        setting.long_answers |= tight;
        scheduler.max_num_batched_tokens = random.one_in(3) ? random.between(1, 12) : random.between(8, 512);
    }
    if (random.one_in(3)) {
        scheduler.step_time = step_seconds;
        scheduler.target_tpot_s = 1e-3 * random.between(1, 20);
    }
    setting.prefix_caching = !random.one_in(8);
    setting.requests = random.between(1, 20);
    setting.faults = random.one_in(3);
    setting.interruptions = random.one_in(2);
    return setting;
}

RequestMaker::RequestMaker(const Setting& setting, Scripts& scripts, Random& random)
    : setting_(setting), scripts_(scripts), random_(random), texts_(2) {
    for (auto& text : texts_) {
        for (int32_t i = 0; i < kTextTokens; ++i) {
            text.push_back(random_.between(1000, 1999));
        }
    }
}

std::vector<TokenId> RequestMaker::prompt() {
    std::vector<TokenId> tokens;
    if (!earlier_.empty() &&
        random_.one_in(3)) {  // the next turn of a conversation, or the same question again
        const auto& [request, script] = earlier_[random_.next() % earlier_.size()];
        tokens = request.prompt;
        const int32_t turns = random_.one_in(3) ? 0 : request.sampling.max_tokens;
        for (int32_t place = 0; place < turns && place != script.stop_at; ++place) {
            tokens.push_back(script.token(place));
        }
    } else {
        const int32_t longest = setting_.long_answers ? 70 : kTextTokens;
        const auto& text = texts_[random_.next() % texts_.size()];
        const int32_t shared =
            random_.one_in(2) ? 64 * random_.between(0, longest / 64) : random_.between(0, longest);
        tokens.assign(text.begin(), text.begin() + shared);
    }
    const int32_t own = random_.one_in(3) ? 0 : random_.between(1, 90);
    for (int32_t i = 0; i < own; ++i) {
        tokens.push_back(random_.between(2000, 2999));
    }
    return tokens;
}

SamplingParams RequestMaker::sampling(Script& script) {
    SamplingParams sampling;
    const int32_t most = setting_.long_answers ? kTextTokens : 100;
    sampling.max_tokens = random_.one_in(4) ? random_.between(1, 3) : random_.between(1, most);
    sampling.min_tokens = random_.one_in(3) ? random_.between(0, sampling.max_tokens) : 0;
    sampling.ignore_eos = random_.one_in(5);
    if (random_.one_in(4)) {
        sampling.stop_ids = {kOwnStop};
    }
    const bool may_stop = !sampling.ignore_eos || !sampling.stop_ids.empty();
    if (may_stop && random_.one_in(setting_.long_answers ? 4 : 2)) {
        script.stop_at = random_.between(sampling.min_tokens, sampling.max_tokens);
        script.stop_token =
            sampling.ignore_eos || (!sampling.stop_ids.empty() && random_.one_in(2)) ? kOwnStop : kEos;
    }
    if (sampling.ignore_eos) {
        script.eos_ignored_at = random_.between(0, sampling.max_tokens);
    } else if (sampling.min_tokens > 0) {
        script.eos_ignored_at = random_.between(0, sampling.min_tokens - 1);
    }
    if (setting_.faults && random_.one_in(6)) {
        script.error_at = random_.between(0, sampling.max_tokens);
    }
    return sampling;
}

Request RequestMaker::make(RequestId id, TimeNs now, const Scheduler& scheduler) {
    Request request;
    Script script;
    script.key = random_.next();
    if (!earlier_.empty() &&
        random_.one_in(8)) {  // the same again: two sequences make the same pages at once
        std::tie(request, script) = earlier_[random_.next() % earlier_.size()];
        request.deadline = 0;
    } else {
        request.prompt = prompt();
        request.sampling = sampling(script);
    }
    request.id = id;
    request.sampling.seed = id;
    script.salt = random_.one_in(4) ? static_cast<uint64_t>(random_.between(1, 2)) : 0;
    request.cache_salt = script.salt == 0 ? "" : "tenant " + std::to_string(script.salt);
    request.priority = random_.one_in(4) ? random_.between(-1, 1) : 0;
    if (setting_.interruptions && random_.one_in(5)) {
        request.deadline = now + random_.between(1, 300);
    }
    if (request.prompt.empty()) {
        check(!scheduler.fits(request).ok(), "sim: an empty prompt fits");
        request.prompt.push_back(1);
    }
    // Too long for the pool or the context is refused, and cutting it must help.
    const int32_t longest =
        std::min(static_cast<int32_t>(kPageTokens) * setting_.pages, setting_.scheduler.max_model_len);
    if (!scheduler.fits(request).ok()) {
        request.prompt.resize(
            std::clamp<size_t>(request.prompt.size(), 1, static_cast<size_t>(std::max(1, longest / 2))));
        request.sampling.max_tokens =
            std::clamp(request.sampling.max_tokens, 1, longest - static_cast<int32_t>(request.prompt.size()));
        request.sampling.min_tokens = std::min(request.sampling.min_tokens, request.sampling.max_tokens);
    }
    check(scheduler.fits(request).ok(), "sim: a request cut to the pool and the context does not fit");
    scripts_[id] = script;
    earlier_.emplace_back(request, script);
    return request;
}

}  // namespace tessera::sim
