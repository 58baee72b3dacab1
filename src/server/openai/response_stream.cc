#include "server/openai/response_stream.h"

#include <algorithm>
#include <fmt/format.h>

namespace tessera {
namespace {

// How a finish reason that is no answer looks to the client; nothing for those that are.
std::optional<ApiError> failure(const StreamDelta& delta) {
    switch (delta.finish) {
        case FinishReason::kAbort:
            return api_error(unavailable("the request was cancelled: the server is shutting down"));
        case FinishReason::kDeadline:
            return api_error({StatusCode::kDeadlineExceeded, "the request's deadline has passed"});
        case FinishReason::kError:
            return api_error({StatusCode::kInternal, fmt::format("the request failed: {}", delta.error)});
        default:
            return std::nullopt;
    }
}

void append_text(ChoiceText& out, OutputDelta&& delta, const std::vector<std::string>& call_ids) {
    out.reasoning += delta.reasoning;
    out.content += delta.content;
    for (ToolCallDelta& call : delta.tool_calls) {
        if (!call.name.empty()) {
            out.whole_calls.push_back({call_ids[out.whole_calls.size()], std::move(call.name), {}});
        }
        if (!out.whole_calls.empty()) {
            out.whole_calls.back().arguments += call.arguments;
        }
    }
}

}  // namespace

void ResponseStream::start(ContextPtr context, std::shared_ptr<HttpExchange> exchange, ResponsePlan plan) {
    std::make_shared<ResponseStream>(std::move(context), std::move(exchange), std::move(plan))->submit_all();
}

ResponseStream::ResponseStream(ContextPtr context, std::shared_ptr<HttpExchange> exchange, ResponsePlan plan)
    : context_(std::move(context)),
      exchange_(std::move(exchange)),
      plan_(std::move(plan)),
      writer_(context_->tokenizer, plan_.writer) {
    for (SequencePlan& sequence : plan_.sequences) {
        const RequestId id = context_->engine.new_request_id();
        sequence.request.id = id;
        ids_.push_back(id);
        Choice& choice = choices_.emplace_back();
        choice.prompt = sequence.prompt;
        choice.stream = std::make_unique<TokenStream>(
            context_->tokenizer, std::move(sequence.stream),
            [context = context_, id](int32_t n) { context->engine.finish(id, n); });
        if (!plan_.writer.chat) {
            choice.text.prompt_ids = prompt_ids(choice);
        }
    }
    live_ = choices_.size();
}

void ResponseStream::submit_all() {
    std::vector<int32_t> max_tokens;
    for (size_t i = 0; i < plan_.sequences.size(); ++i) {
        Request& request = plan_.sequences[i].request;
        request.prompt = plan_.prompts[plan_.sequences[i].prompt];
        max_tokens.push_back(request.sampling.max_tokens);
        const Status status = context_->engine.submit(
            std::move(request),
            [self = shared_from_this(), i](TokenEvent&& event) { self->on_event(i, std::move(event)); });
        if (status.ok()) {
            continue;
        }
        for (size_t k = 0; k < i; ++k) {
            context_->engine.cancel(ids_[k]);
        }
        ApiError error = api_error(status);
        if (status.code() == StatusCode::kInvalidArgument) {
            error.code = "context_length_exceeded";
        }
        respond_error(*exchange_, error);
        if (context_->metrics != nullptr) {
            context_->metrics->client_request_rejected(error.status);
        }
        return;  // begin() never comes: what the cancelled ones still tell is dropped with this object
    }
    plan_.sequences.clear();
    begin(max_tokens);
}

void ResponseStream::begin(const std::vector<int32_t>& max_tokens) {
    {
        std::lock_guard lock(mutex_);
        begun_ = true;
        last_write_ = now_ns();
        for (size_t i = 0; i < choices_.size(); ++i) {
            if (context_->metrics != nullptr) {
                choices_[i].meter = RequestMeter(*context_->metrics, plan_.received, max_tokens[i]);
            }
        }
        for (auto& [index, event] : early_) {
            handle(index, std::move(event));
        }
        early_.clear();
    }
    // Weak: the exchange outlives the answer and must not keep it alive.
    exchange_->on_disconnect([weak = weak_from_this()] {
        if (const auto self = weak.lock()) {
            self->gone_ = true;
            self->cancel_all();
        }
    });
    if (plan_.stream) {
        arm_ping(std::chrono::nanoseconds(context_->config.ping_interval).count());
    }
}

void ResponseStream::on_event(size_t index, TokenEvent&& event) {
    std::lock_guard lock(mutex_);
    if (begun_) {
        handle(index, std::move(event));
    } else {
        early_.emplace_back(index, std::move(event));
    }
}

void ResponseStream::handle(size_t index, TokenEvent&& event) {
    Choice& choice = choices_[index];
    const int32_t before = choice.stream->completion_tokens();
    StreamDelta delta = choice.stream->push(std::move(event));
    choice.meter.on_event(event, choice.stream->completion_tokens() - before);
    const bool ended = delta.finish != FinishReason::kNone;
    live_ -= ended ? 1 : 0;
    std::string piece;
    if (!answered_ && !gone_) {
        if (const std::optional<ApiError> error = failure(delta)) {
            fail(*error);
        } else {
            if (ended) {
                const bool called = delta.finish == FinishReason::kStop && choice.stream->tool_calls() > 0;
                choice.end = {
                    std::string(called ? std::string_view("tool_calls") : finish_reason_name(delta.finish)),
                    std::move(delta.stop_text), delta.stop_token};
            }
            if (plan_.stream) {
                add_stream(index, std::move(delta), piece);
            } else {
                add_whole(index, std::move(delta));
            }
        }
    }
    if (live_ == 0) {
        finish_all(piece);
    } else if (!piece.empty()) {
        send(std::move(piece));
    }
}

std::vector<std::string> ResponseStream::new_call_ids(Choice& choice, const OutputDelta& delta) {
    std::vector<std::string> ids;
    for (const ToolCallDelta& call : delta.tool_calls) {
        if (!call.name.empty()) {
            ids.push_back("call_" + context_->random.hex(24));
            choice.call_ids.push_back(ids.back());
        }
    }
    return ids;
}

void ResponseStream::add_stream(size_t index, StreamDelta&& delta, std::string& piece) {
    Choice& choice = choices_[index];
    if (!choice.begun && plan_.writer.chat) {
        piece += writer_.role_event(static_cast<int>(index), prompt_ids(choice));
    }
    choice.begun = true;
    if (plan_.writer.logprobs || plan_.writer.token_ids) {
        std::move(delta.tokens.begin(), delta.tokens.end(), std::back_inserter(choice.text.tokens));
    }
    const std::optional<Usage> now = plan_.continuous_usage ? std::optional(usage()) : std::nullopt;
    // Tokens whose text is held back wait here for the next chunk; the last of them get one of their own.
    const bool ended = delta.finish != FinishReason::kNone;
    if (!delta.output.empty() || (ended && !choice.text.tokens.empty())) {
        const std::vector<std::string> ids = new_call_ids(choice, delta.output);
        choice.text.reasoning = std::move(delta.output.reasoning);
        choice.text.content = std::move(delta.output.content);
        choice.text.tool_calls = std::move(delta.output.tool_calls);
        piece += writer_.text_event(static_cast<int>(index), choice.text, ids, now ? &*now : nullptr);
        choice.text = {};
    }
    if (ended) {
        piece += writer_.finish_event(static_cast<int>(index), choice.end, now ? &*now : nullptr);
    }
}

void ResponseStream::add_whole(size_t index, StreamDelta&& delta) {
    Choice& choice = choices_[index];
    new_call_ids(choice, delta.output);
    append_text(choice.text, std::move(delta.output), choice.call_ids);
    if (plan_.writer.logprobs || plan_.writer.token_ids) {
        std::move(delta.tokens.begin(), delta.tokens.end(), std::back_inserter(choice.text.tokens));
    }
}

// The last sequence has ended.
void ResponseStream::finish_all(std::string& piece) {
    if (context_->metrics != nullptr && !rejected_) {
        int32_t longest = 0;
        for (const Choice& choice : choices_) {
            longest = std::max(longest, choice.stream->completion_tokens());
        }
        context_->metrics->client_request_finished(plan_.n, longest);
    }
    if (answered_ || gone_) {
        return;
    }
    answered_ = true;
    if (plan_.stream) {
        if (plan_.include_usage) {
            piece += writer_.usage_event(usage());
        }
        piece += kStreamEnd;
        send(std::move(piece));
        exchange_->end();
        return;
    }
    std::string body = writer_.whole_begin();
    for (size_t i = 0; i < choices_.size(); ++i) {
        body += i > 0 ? "," : "";
        body += writer_.whole_choice(static_cast<int>(i), choices_[i].text, choices_[i].end);
    }
    body += writer_.whole_end(usage(), plan_.writer.chat ? prompt_ids(choices_.front()) : nullptr);
    respond_json(*exchange_, std::move(body));
}

// One sequence failed, so the answer does; the others are cancelled.
void ResponseStream::fail(const ApiError& error) {
    answered_ = true;
    cancel_all();
    if (opened_) {
        send("data: " + error_json(error) + "\n\n" + std::string(kStreamEnd));
        exchange_->end();
        return;
    }
    rejected_ = true;
    respond_error(*exchange_, error);
    if (context_->metrics != nullptr) {
        context_->metrics->client_request_rejected(error.status);
    }
}

void ResponseStream::open_stream() {
    if (!opened_) {
        opened_ = true;
        exchange_->start_stream(200, "text/event-stream", {{"Cache-Control", "no-cache"}});
    }
}

void ResponseStream::send(std::string piece) {
    open_stream();
    last_write_ = now_ns();
    if (!exchange_->write(std::move(piece))) {
        gone_ = true;
        cancel_all();
    }
}

void ResponseStream::cancel_all() {
    for (const RequestId id : ids_) {
        context_->engine.cancel(id);
    }
}

// A stream that has been silent for the interval carries a comment, so that proxies keep it open. The headers
// wait for the first of both, token or ping: until then an error can still be an HTTP status.
void ResponseStream::arm_ping(TimeNs delay) {
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(std::chrono::nanoseconds(delay));
    exchange_->after(wait, [weak = weak_from_this()] {
        if (const auto self = weak.lock()) {
            self->ping();
        }
    });
}

void ResponseStream::ping() {
    const TimeNs interval = std::chrono::nanoseconds(context_->config.ping_interval).count();
    TimeNs wait = interval;
    {
        std::lock_guard lock(mutex_);
        if (answered_ || gone_) {
            return;
        }
        const TimeNs silent = now_ns() - last_write_;
        if (silent >= interval) {
            send(std::string(kPing));
        } else {
            wait = interval - silent;
        }
    }
    arm_ping(wait);
}

Usage ResponseStream::usage() const {
    Usage out;
    std::vector<bool> counted(plan_.prompts.size());
    for (const Choice& choice : choices_) {
        out.completion_tokens += choice.stream->completion_tokens();
        out.reasoning_tokens += choice.stream->reasoning_tokens();
        if (!counted[choice.prompt]) {  // a prompt counts once, however many answers it gets
            counted[choice.prompt] = true;
            out.prompt_tokens += static_cast<int64_t>(plan_.prompts[choice.prompt].size());
            out.cached_tokens += choice.stream->cached_tokens();
        }
    }
    return out;
}

const std::vector<TokenId>* ResponseStream::prompt_ids(const Choice& choice) const {
    return plan_.writer.token_ids ? &plan_.prompts[choice.prompt] : nullptr;
}

}  // namespace tessera
