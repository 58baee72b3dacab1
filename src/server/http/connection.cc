#include "server/http/connection.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include "base/log.h"
#include "server/http/answer.h"
#include "server/http/exchange.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;

constexpr size_t kReadBytes = size_t{16} << 10;
// Bytes of later requests kept while an answer is in progress; reading pauses beyond it.
constexpr size_t kKeptBytesMax = size_t{64} << 10;
// A body may take body_timeout, and longer as long as it comes at this rate.
constexpr size_t kBodyBytesPerSecondMin = size_t{16} << 10;
// After an answer that closes the connection: time to read and drop what the client still sends, since
// closing a socket with unread bytes resets it and can lose the answer on its way.
constexpr milliseconds kLingerTime{2'000};
// Buffers above this are given back between requests.
constexpr size_t kKeptCapacity = size_t{64} << 10;

}  // namespace

HttpConnection::HttpConnection(ConnectionHost& host, std::unique_ptr<IoSocket> socket)
    : host_(host),
      config_(host.config()),
      draining_(host.draining()),
      write_queue_bytes_max_(host.config().write_queue_bytes_max),
      socket_(std::move(socket)),
      read_timer_(socket_->make_timer()),
      write_timer_(socket_->make_timer()),
      read_buffer_(kReadBytes) {}

HttpConnection::~HttpConnection() = default;

void HttpConnection::post(Step step) {
    socket_->post([self = shared_from_this(), step] { (self.get()->*step)(); });
}

void HttpConnection::start() {
    socket_->post([self = shared_from_this()] {
        if (self->phase_ == Phase::kClosed) {
            return;
        }
        self->arm_read_timer(self->config_.header_timeout);
        self->socket_->handshake([self](IoResult result, size_t) { self->on_handshake(result); });
    });
}

void HttpConnection::refuse() {
    socket_->post([self = shared_from_this()] {
        if (self->phase_ == Phase::kClosed) {
            return;
        }
        if (self->socket_->tls()) {
            return self->shut();  // a handshake costs more than the refusal is worth
        }
        self->refuse_request(
            {.status = 503, .message = "the server has too many connections; try again later"},
            {{"Retry-After", "1"}});
        self->start_read();
    });
}

void HttpConnection::close_idle() {
    socket_->post([self = shared_from_this()] {
        if (self->phase_ == Phase::kIdle && self->answers_ > 0) {
            self->linger();
        }
    });
}

void HttpConnection::cut() {
    post(&HttpConnection::shut);
}

void HttpConnection::on_handshake(IoResult result) {
    if (phase_ == Phase::kClosed) {
        return;
    }
    if (result != IoResult::kOk) {
        return shut();
    }
    begin_request(config_.header_timeout);
}

// ---- reading

void HttpConnection::begin_request(milliseconds timeout) {
    parser_.emplace(HttpParserLimits{config_.header_bytes_max, config_.body_bytes_max});
    verdict_ = {};
    phase_ = Phase::kIdle;
    arm_read_timer(timeout);
    process_input();
    if (phase_ == Phase::kIdle) {
        const bool peer_closed = [&] {
            std::lock_guard lock(outbox_.mutex);
            return outbox_.peer_closed;
        }();
        // While draining a new connection still gets one answer.
        if (peer_closed || (draining_->load() && answers_ > 0)) {
            return linger();
        }
    }
    start_read();
}

void HttpConnection::start_read() {
    const bool full = phase_ == Phase::kAnswer && input_.size() >= kKeptBytesMax;
    if (reading_ || full || phase_ == Phase::kClosed) {
        return;
    }
    reading_ = true;
    socket_->read_some(
        read_buffer_.data(), read_buffer_.size(),
        [self = shared_from_this()](IoResult result, size_t bytes) { self->on_read(result, bytes); });
}

void HttpConnection::on_read(IoResult result, size_t bytes) {
    reading_ = false;
    if (phase_ == Phase::kClosed) {
        return;
    }
    if (result == IoResult::kFailed) {
        return shut();
    }
    if (result == IoResult::kEnd) {
        return on_end_of_input();
    }
    if (phase_ != Phase::kLinger) {
        input_.append(read_buffer_.data(), bytes);
        process_input();
    }
    start_read();
}

// The client sends no more. While an answer is in progress that means that it has left, unless nobody asked
// to hear of it: then it may have closed its sending side only, and gets its answer.
void HttpConnection::on_end_of_input() {
    if (phase_ != Phase::kAnswer) {
        return shut();
    }
    const bool watched = [&] {
        std::lock_guard lock(outbox_.mutex);
        outbox_.peer_closed = true;
        return outbox_.disconnected != nullptr;
    }();
    if (watched) {
        shut();
    }
}

void HttpConnection::process_input() {
    if (phase_ == Phase::kIdle) {
        input_.erase(0, input_.find_first_not_of("\r\n"));  // empty lines between requests
        if (input_.empty()) {
            return;
        }
        phase_ = Phase::kHeader;
        received_ = now_ns();
        arm_read_timer(config_.header_timeout);
    }
    while (phase_ == Phase::kHeader || phase_ == Phase::kBody) {
        const size_t used = parser_->feed(input_);
        input_.erase(0, used);
        const HttpRequestParser::State state = parser_->state();
        if (state == HttpRequestParser::State::kFailed) {
            return refuse_request(parser_->error(), {});
        }
        if (state == HttpRequestParser::State::kHeader) {
            return;
        }
        if (phase_ == Phase::kHeader) {
            if (!on_header()) {
                return;
            }
            start_body();
        } else if (state == HttpRequestParser::State::kBody) {
            return;
        }
        if (parser_->state() == HttpRequestParser::State::kComplete) {
            return dispatch();
        }
    }
}

bool HttpConnection::on_header() {
    HttpRequest& request = parser_->request();
    request.request_id = request_id(request.header("x-request-id"));
    verdict_ = check_header(host_.routes(), host_.access(), request);
    if (verdict_.preflight) {
        answer_directly(204, "", "", verdict_.headers);
        return false;
    }
    if (verdict_.route == nullptr) {
        refuse_request(verdict_.error, verdict_.headers);
        return false;
    }
    const std::string_view expect = request.header("expect");
    if (!expect.empty() && !parser_->http_1_0() && parser_->state() == HttpRequestParser::State::kBody &&
        !parser_->expects_continue()) {
        refuse_request({.status = 417, .message = fmt::format("cannot meet `Expect: {}`", expect)}, {});
        return false;
    }
    return true;
}

void HttpConnection::start_body() {
    phase_ = Phase::kBody;
    body_started_ = now_ns();
    arm_read_timer(config_.body_timeout);
    if (parser_->expects_continue() && input_.empty()) {
        std::lock_guard lock(outbox_.mutex);
        outbox_.pending += "HTTP/1.1 100 Continue\r\n\r\n";
        outbox_.flush_posted = true;
        post(&HttpConnection::flush);
    }
}

void HttpConnection::arm_read_timer(milliseconds delay) {
    read_timer_->start(delay, [self = shared_from_this()] { self->on_read_timeout(); });
}

void HttpConnection::on_read_timeout() {
    switch (phase_) {
        case Phase::kHeader:
            return refuse_request({.status = 408,
                                   .message = fmt::format("the request's header did not come within {} ms",
                                                          config_.header_timeout.count())},
                                  {});
        case Phase::kBody: {
            const size_t bytes = parser_->request().body.size();
            const milliseconds allowed =
                config_.body_timeout + milliseconds(bytes * 1000 / kBodyBytesPerSecondMin);
            const milliseconds spent((now_ns() - body_started_) / kNsPerMs);
            if (spent < allowed) {
                return arm_read_timer(allowed - spent);
            }
            return refuse_request(
                {.status = 408,
                 .message = fmt::format("the request's body came too slowly: {} bytes in {} ms", bytes,
                                        spent.count())},
                {});
        }
        case Phase::kIdle:
            return linger();
        case Phase::kHandshake:
        case Phase::kLinger:
            return shut();
        case Phase::kAnswer:
        case Phase::kClosed:
            return;
    }
}

// ---- answering

uint64_t HttpConnection::open_answer() {
    phase_ = Phase::kAnswer;
    read_timer_->cancel();
    std::lock_guard lock(outbox_.mutex);
    outbox_.exchange = ++answers_;
    return answers_;
}

void HttpConnection::dispatch() {
    const uint64_t number = open_answer();
    dispatched_ = true;
    host_.on_exchange_opened();
    if (config_.log_requests) {
        const HttpRequest& request = parser_->request();
        log_line_ = fmt::format("{} {} {}", request.request_id, request.method, request.path);
    }
    const std::shared_ptr<HttpExchange> exchange = make_exchange({.connection = shared_from_this(),
                                                                  .number = number,
                                                                  .request = std::move(parser_->request()),
                                                                  .common_headers = verdict_.headers,
                                                                  .http_1_0 = parser_->http_1_0(),
                                                                  .keep_alive = parser_->keep_alive(),
                                                                  .draining = draining_});
    if (!host_.dispatch(*verdict_.route, exchange)) {
        exchange->respond(
            503, "application/json",
            http_error_body({.status = 503, .message = "the server is overloaded; try again later"}),
            {{"Retry-After", "1"}});
    }
}

void HttpConnection::refuse_request(const HttpError& error, HttpHeaders headers) {
    answer_directly(error.status, "application/json", http_error_body(error), headers);
}

// Without a handler. Bytes of a body that has not been read make the connection unusable for more.
void HttpConnection::answer_directly(int status, std::string_view content_type, const std::string& body,
                                     const HttpHeaders& headers) {
    const uint64_t number = open_answer();
    const bool parsed = parser_ && parser_->state() != HttpRequestParser::State::kFailed;
    const bool whole = parsed && parser_->state() == HttpRequestParser::State::kComplete;
    const bool keep_alive = whole && parser_->keep_alive() && !draining_->load();
    const bool head_only = parsed && parser_->request().method == "HEAD";
    Send send_all{.last = true, .close = !keep_alive, .status = status};
    send_all.bytes = answer_head({.status = status,
                                  .content_type = content_type,
                                  .headers = headers,
                                  .common = {},
                                  .request_id = parsed ? parser_->request().request_id : std::string(),
                                  .content_length = body.size(),
                                  .http_1_0 = parsed && parser_->http_1_0(),
                                  .keep_alive = keep_alive});
    if (!head_only) {
        send_all.bytes += body;
    }
    send(number, std::move(send_all));
}

bool HttpConnection::send(uint64_t exchange, Send piece) {
    std::lock_guard lock(outbox_.mutex);
    Outbox& out = outbox_;
    if (out.gone || out.exchange != exchange || out.complete) {
        return false;
    }
    const size_t queued = out.pending.size() + out.writing_bytes;
    if (piece.bounded && queued > 0 && queued + piece.bytes.size() > write_queue_bytes_max_) {
        out.gone = true;
        post(&HttpConnection::shut);
        return false;
    }
    if (out.pending.empty()) {
        out.pending = std::move(piece.bytes);
    } else {
        out.pending += piece.bytes;
    }
    out.complete = piece.last;
    out.close |= piece.close;
    out.status = piece.status != 0 ? piece.status : out.status;
    if (!out.writing && !out.flush_posted) {
        out.flush_posted = true;
        post(&HttpConnection::flush);
    }
    return true;
}

void HttpConnection::abandon(uint64_t exchange) {
    std::lock_guard lock(outbox_.mutex);
    if (!outbox_.gone && outbox_.exchange == exchange) {
        outbox_.gone = true;
        post(&HttpConnection::shut);
    }
}

// Posts are made under the mutex: once `gone` is set nothing more is posted to a loop that may be ending.
void HttpConnection::on_disconnect(uint64_t exchange, std::function<void()> callback) {
    std::lock_guard lock(outbox_.mutex);
    Outbox& out = outbox_;
    if (out.exchange != exchange || out.complete) {
        return;
    }
    if (!out.gone && !out.peer_closed) {
        out.disconnected = std::move(callback);
        return;
    }
    out.gone = true;
    socket_->post([self = shared_from_this(), callback = std::move(callback)] {
        self->shut();
        callback();
    });
}

void HttpConnection::after(uint64_t exchange, milliseconds delay, std::function<void()> task) {
    const auto is_over = [this, exchange] {
        std::lock_guard lock(outbox_.mutex);
        return outbox_.gone || outbox_.exchange != exchange || outbox_.complete;
    };
    const auto arm = [self = shared_from_this(), is_over, delay, task = std::move(task)] {
        if (is_over()) {
            return;
        }
        IoTimer* timer = self->exchange_timers_.emplace_back(self->socket_->make_timer()).get();
        timer->start(delay, [self, timer, is_over, task] {
            std::erase_if(self->exchange_timers_, [&](const auto& owned) { return owned.get() == timer; });
            if (!is_over()) {
                task();
            }
        });
    };
    std::lock_guard lock(outbox_.mutex);
    if (!outbox_.gone) {
        socket_->post(arm);
    }
}

// ---- writing

void HttpConnection::flush() {
    if (phase_ == Phase::kClosed) {
        return;
    }
    bool write = false;
    bool done = false;
    {
        std::lock_guard lock(outbox_.mutex);
        outbox_.flush_posted = false;
        if (outbox_.writing || outbox_.gone) {
            return;
        }
        write = !outbox_.pending.empty();
        done = !write && outbox_.complete;
        if (write) {
            outbox_.writing = true;
            output_.clear();
            std::swap(output_, outbox_.pending);
            outbox_.writing_bytes = output_.size();
        }
    }
    if (write) {
        output_offset_ = 0;
        write_more();
    } else if (done) {
        on_answer_written();
    }
}

void HttpConnection::write_more() {
    write_timer_->start(config_.write_timeout, [self = shared_from_this()] { self->shut(); });
    socket_->write_some(
        std::string_view(output_).substr(output_offset_),
        [self = shared_from_this()](IoResult result, size_t bytes) { self->on_written(result, bytes); });
}

void HttpConnection::on_written(IoResult result, size_t bytes) {
    if (phase_ == Phase::kClosed) {
        return;
    }
    if (result != IoResult::kOk) {
        return shut();
    }
    output_offset_ += bytes;
    {
        std::lock_guard lock(outbox_.mutex);
        outbox_.writing_bytes = output_.size() - output_offset_;
        outbox_.writing = outbox_.writing_bytes > 0;
    }
    if (output_offset_ < output_.size()) {
        return write_more();
    }
    write_timer_->cancel();
    if (output_.capacity() > kKeptCapacity) {
        output_ = {};
    }
    flush();
}

void HttpConnection::on_answer_written() {
    bool close = false;
    int status = 0;
    std::function<void()> forgotten;
    {
        std::lock_guard lock(outbox_.mutex);
        close = outbox_.close;
        status = outbox_.status;
        forgotten = std::exchange(outbox_.disconnected, nullptr);
        outbox_.exchange = 0;
        outbox_.complete = false;
        outbox_.close = false;
        outbox_.status = 0;
    }
    exchange_timers_.clear();
    if (std::exchange(dispatched_, false)) {
        if (config_.log_requests) {
            log_info(
                fmt::format("{} {} in {:.1f} ms", log_line_, status, seconds(now_ns() - received_) * 1e3));
        }
        host_.on_exchange_closed();
    }
    if (close) {
        return linger();
    }
    begin_request(config_.idle_timeout);
}

// ---- the end

void HttpConnection::linger() {
    bool peer_closed = false;
    {
        std::lock_guard lock(outbox_.mutex);
        peer_closed = outbox_.peer_closed;
        outbox_.gone = true;
    }
    if (peer_closed) {
        return shut();
    }
    phase_ = Phase::kLinger;
    input_.clear();
    arm_read_timer(kLingerTime);
    socket_->shutdown_write([self = shared_from_this()] {});
    start_read();
}

void HttpConnection::shut() {
    if (phase_ == Phase::kClosed) {
        return;
    }
    phase_ = Phase::kClosed;
    std::function<void()> disconnected;
    {
        std::lock_guard lock(outbox_.mutex);
        outbox_.gone = true;
        outbox_.pending = {};
        disconnected = std::exchange(outbox_.disconnected, nullptr);
    }
    read_timer_->cancel();
    write_timer_->cancel();
    exchange_timers_.clear();
    socket_->close();
    if (disconnected) {
        disconnected();
    }
    if (std::exchange(dispatched_, false)) {
        if (config_.log_requests) {
            log_info(fmt::format("{} cut after {:.1f} ms", log_line_, seconds(now_ns() - received_) * 1e3));
        }
        host_.on_exchange_closed();
    }
    host_.on_connection_closed(*this);
}

}  // namespace tessera
