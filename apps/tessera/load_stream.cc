#include "load_stream.h"

#include "base/json.h"

namespace tessera {
namespace {

constexpr size_t kLineBytesMax = size_t{4} << 20;

bool has_text(const json::Value* value) {
    return value != nullptr && value->is_string() && !value->as_string().empty();
}

// A chunk whose choice carries text, reasoning or a tool call; not the role chunk and not the finish chunk.
bool has_output(const json::Value& choice) {
    if (has_text(choice.find("text"))) {
        return true;
    }
    const json::Value* delta = choice.find("delta");
    if (delta == nullptr) {
        return false;
    }
    const json::Value* calls = delta->find("tool_calls");
    return has_text(delta->find("content")) || has_text(delta->find("reasoning_content")) ||
           has_text(delta->find("reasoning")) || (calls != nullptr && !calls->items().empty());
}

int64_t integer_or_zero(const json::Value* value) {
    return value == nullptr ? 0 : value->as_int64().value_or(0);
}

}  // namespace

void LoadStream::feed(std::string_view bytes, TimeNs now) {
    while (!bytes.empty()) {
        const size_t end = bytes.find('\n');
        line_.append(bytes.substr(0, end));
        if (line_.size() > kLineBytesMax) {
            result_.error = "a line of the stream is over 4 MiB";
            line_.clear();
        }
        if (end == std::string_view::npos) {
            return;
        }
        bytes.remove_prefix(end + 1);
        if (!line_.empty() && line_.back() == '\r') {
            line_.pop_back();
        }
        take_line(line_, now);
        line_.clear();
    }
}

// Only data lines matter; comments (": ping") and empty lines do not.
void LoadStream::take_line(std::string_view line, TimeNs now) {
    constexpr std::string_view kData = "data:";
    if (!line.starts_with(kData)) {
        return;
    }
    line.remove_prefix(kData.size());
    if (line.starts_with(' ')) {
        line.remove_prefix(1);
    }
    if (line == "[DONE]") {
        done_ = true;
        return;
    }
    take_event(line, now);
}

void LoadStream::take_event(std::string_view json_text, TimeNs now) {
    const Result<json::Value> event = json::parse(json_text);
    if (!event.ok()) {
        result_.error = "an event is no JSON: " + event.status().message();
        return;
    }
    if (const json::Value* error = event->find("error")) {
        const json::Value* message = error->find("message");
        result_.error =
            "the stream reports: " +
            (message != nullptr && message->is_string() ? message->as_string() : json::dump(*error));
        return;
    }
    if (const json::Value* choices = event->find("choices");
        choices != nullptr && !choices->items().empty()) {
        const json::Value& choice = choices->items()[0];
        if (has_output(choice)) {
            take_output(now);
        }
        finish_seen_ = finish_seen_ || has_text(choice.find("finish_reason"));
    }
    if (const json::Value* usage = event->find("usage"); usage != nullptr && usage->is_object()) {
        usage_seen_ = true;
        result_.prompt_tokens = integer_or_zero(usage->find("prompt_tokens"));
        result_.output_tokens = integer_or_zero(usage->find("completion_tokens"));
        if (const json::Value* details = usage->find("prompt_tokens_details")) {
            result_.cached_tokens = integer_or_zero(details->find("cached_tokens"));
        }
    }
}

void LoadStream::take_output(TimeNs now) {
    if (outputs_++ == 0) {
        result_.first = now;
    } else {
        result_.gaps.push_back(now - last_);
    }
    last_ = now;
}

void LoadStream::end(TimeNs now) {
    // The answer ends with its last output; the usage and [DONE] that follow are not the model's time.
    result_.finished = outputs_ > 0 ? last_ : now;
    if (outputs_ == 0) {
        result_.first = now;
    }
    if (!usage_seen_) {
        result_.output_tokens = outputs_;
    }
    if (result_.error.empty() && !done_) {
        result_.error = "the stream ended without [DONE]";
    }
    if (result_.error.empty() && !finish_seen_) {
        result_.error = "the stream ended without a finish_reason";
    }
}

}  // namespace tessera
