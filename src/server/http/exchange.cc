#include "server/http/exchange.h"

#include <mutex>
#include <utility>

#include "base/log.h"
#include "server/http/answer.h"
#include "server/http/connection.h"
#include "server/http_error.h"

namespace tessera {
namespace {

class Exchange final : public HttpExchange {
  public:
    explicit Exchange(ExchangeArgs args)
        : args_(std::move(args)), head_only_(args_.request.method == "HEAD") {}

    ~Exchange() override {
        if (state_ == State::kNew) {
            const std::string body =
                http_error_body({.status = 500, .message = "the server failed to answer this request"});
            if (answer(500, "application/json", body, {})) {
                log_error("a handler let go of its exchange without an answer");
            }
        } else if (state_ == State::kStreaming) {
            // Without its last chunk the client sees that the answer is not whole.
            args_.connection->abandon(args_.number);
        }
    }

    const HttpRequest& request() const override { return args_.request; }

    void respond(int status, std::string content_type, std::string body, HttpHeaders headers) override {
        std::lock_guard lock(mutex_);
        if (!leave_new(State::kDone)) {
            return;
        }
        answer(status, content_type, body, headers);
    }

    void start_stream(int status, std::string content_type, HttpHeaders headers) override {
        std::lock_guard lock(mutex_);
        if (!leave_new(State::kStreaming)) {
            return;
        }
        const bool keep_alive = args_.keep_alive && !args_.http_1_0 && !args_.draining->load();
        args_.connection->send(args_.number,
                               {.bytes = head(status, content_type, headers, std::nullopt, keep_alive),
                                .close = !keep_alive,
                                .status = status});
    }

    bool write(std::string piece) override {
        std::lock_guard lock(mutex_);
        if (state_ != State::kStreaming) {
            return false;
        }
        if (head_only_ || piece.empty()) {
            return true;
        }
        if (!args_.http_1_0) {
            std::string chunk;
            chunk.reserve(piece.size() + 16);
            append_chunk(chunk, piece);
            piece = std::move(chunk);
        }
        return args_.connection->send(args_.number, {.bytes = std::move(piece), .bounded = true});
    }

    void end() override {
        std::lock_guard lock(mutex_);
        if (state_ != State::kStreaming) {
            return;
        }
        state_ = State::kDone;
        args_.connection->send(
            args_.number,
            {.bytes = std::string(args_.http_1_0 || head_only_ ? "" : kLastChunk), .last = true});
    }

    void on_disconnect(std::function<void()> callback) override {
        args_.connection->on_disconnect(args_.number, std::move(callback));
    }

    void after(std::chrono::milliseconds delay, std::function<void()> task) override {
        args_.connection->after(args_.number, delay, std::move(task));
    }

  private:
    enum class State { kNew, kStreaming, kDone };

    bool leave_new(State next) {
        if (state_ != State::kNew) {
            log_error("a handler answered its exchange twice");
            return false;
        }
        state_ = next;
        return true;
    }

    // False: the client is gone.
    bool answer(int status, const std::string& content_type, const std::string& body,
                const HttpHeaders& headers) {
        const bool keep_alive = args_.keep_alive && !args_.draining->load();
        std::string bytes = head(status, content_type, headers, body.size(), keep_alive);
        if (!head_only_) {
            bytes += body;
        }
        return args_.connection->send(
            args_.number, {.bytes = std::move(bytes), .last = true, .close = !keep_alive, .status = status});
    }

    std::string head(int status, const std::string& content_type, const HttpHeaders& headers,
                     std::optional<size_t> content_length, bool keep_alive) const {
        return answer_head({.status = status,
                            .content_type = content_type,
                            .headers = headers,
                            .common = args_.common_headers,
                            .request_id = args_.request.request_id,
                            .content_length = content_length,
                            .http_1_0 = args_.http_1_0,
                            .keep_alive = keep_alive});
    }

    const ExchangeArgs args_;
    const bool head_only_;
    std::mutex mutex_;
    State state_ = State::kNew;
};

}  // namespace

std::shared_ptr<HttpExchange> make_exchange(ExchangeArgs args) {
    return std::make_shared<Exchange>(std::move(args));
}

}  // namespace tessera
