// ResponseStream: one client request on its way out. Submits its sequences to the engine, turns their events
// into the answer (server-sent events or one JSON body), and ends it by the contract whatever happens:
// completion, error, deadline, disconnect, shutdown. README.md has the stream's grammar.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/metrics.h"
#include "server/openai/context.h"
#include "server/openai/error.h"
#include "server/openai/response_writer.h"
#include "server/token_stream.h"

namespace tessera {

struct SequencePlan {
    Request request;  // without id and prompt
    TokenStreamConfig stream;
    size_t prompt = 0;  // index into ResponsePlan::prompts
};

struct ResponsePlan {
    WriterConfig writer;
    bool stream = false;
    bool include_usage = false;
    bool continuous_usage = false;
    int32_t n = 1;
    TimeNs received = 0;
    std::vector<std::vector<TokenId>> prompts;
    std::vector<SequencePlan> sequences;  // choice i of the answer is sequence i
};

// Owned by the engine's sinks: it lives until its last sequence has ended. Threads: events come on the
// engine's delivery thread, pings and disconnects on an I/O thread; mutex_ serialises them. Nothing here
// waits for the engine or the client.
class ResponseStream : public std::enable_shared_from_this<ResponseStream> {
  public:
    using ContextPtr = std::shared_ptr<const OpenAiService::Context>;

    // Submits; a refusal is answered at once.
    static void start(ContextPtr context, std::shared_ptr<HttpExchange> exchange, ResponsePlan plan);

    ResponseStream(ContextPtr context, std::shared_ptr<HttpExchange> exchange, ResponsePlan plan);

  private:
    struct Choice {
        std::unique_ptr<TokenStream> stream;
        RequestMeter meter;
        size_t prompt = 0;
        ChoiceText text;  // streaming: only what no chunk has carried yet (tokens); else all so far
        std::vector<std::string> call_ids;
        ChoiceEnd end;
        bool begun = false;  // its first chunk is out
    };

    void submit_all();
    void begin(const std::vector<int32_t>& max_tokens);
    void on_event(size_t index, TokenEvent&& event);
    void handle(size_t index, TokenEvent&& event);
    void add_stream(size_t index, StreamDelta&& delta, std::string& piece);
    void add_whole(size_t index, StreamDelta&& delta);
    std::vector<std::string> new_call_ids(Choice& choice, const OutputDelta& delta);
    void end_choice(size_t index, std::string& piece);
    void finish_all(std::string& piece);
    void fail(const ApiError& error);
    void send(std::string piece);
    void open_stream();
    void cancel_all();
    void arm_ping(TimeNs delay);
    void ping();
    Usage usage() const;
    const std::vector<TokenId>* prompt_ids(const Choice& choice) const;

    const ContextPtr context_;
    const std::shared_ptr<HttpExchange> exchange_;
    ResponsePlan plan_;
    ResponseWriter writer_;
    std::vector<RequestId> ids_;     // of the sequences; constant once submitted
    std::atomic<bool> gone_{false};  // the client went away

    std::mutex mutex_;  // guards all below
    std::vector<Choice> choices_;
    std::vector<std::pair<size_t, TokenEvent>> early_;  // events that came before begin()
    bool begun_ = false;
    bool opened_ = false;    // the stream's headers are out
    bool answered_ = false;  // nothing more is written
    bool rejected_ = false;  // answered by an HTTP error
    size_t live_ = 0;        // sequences that have not ended
    TimeNs last_write_ = 0;
};

}  // namespace tessera
