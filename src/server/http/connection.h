// HttpConnection: one client's connection from its accept to its close; requests one after another, each
// checked, dispatched as an HttpExchange and answered before the next is read from the kept bytes.
//
// Threads: everything runs on the socket's strand, except the members of the Exchange's side, which any
// thread may call; what both sides share is `Outbox`, under its mutex.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "server/http.h"
#include "server/http/access.h"
#include "server/http/http_server_io.h"
#include "server/http/http_server_parser.h"
#include "server/http/request_checks.h"
#include "server/http/route_table.h"

namespace tessera {

class HttpConnection;

// What a connection needs of its server, and tells it. Thread-safe; outlives every connection that is not
// cut.
class ConnectionHost {
  public:
    virtual ~ConnectionHost() = default;
    virtual const HttpServerConfig& config() const = 0;
    virtual const RouteTable& routes() const = 0;
    virtual const AccessRules& access() const = 0;
    virtual std::shared_ptr<const std::atomic<bool>> draining() const = 0;  // answers close their connection
    // Hands the exchange to a worker thread; false when too many wait.
    virtual bool dispatch(const HttpRoute& route, std::shared_ptr<HttpExchange> exchange) = 0;
    virtual void on_exchange_opened() = 0;
    virtual void on_exchange_closed() = 0;
    virtual void on_connection_closed(HttpConnection& connection) = 0;  // once; from the strand
};

class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
  public:
    HttpConnection(ConnectionHost& host, std::unique_ptr<IoSocket> socket);
    ~HttpConnection();

    // From any thread; each does its work on the strand.
    void start();
    void refuse();      // instead of start(): 503, since there are too many connections
    void close_idle();  // closes between requests, if it has had an answer
    void cut();

    // ---- the Exchange's side: any thread. `exchange` is the number of the exchange that calls.
    struct Send {
        std::string bytes;
        bool last = false;     // the answer is complete
        bool close = false;    // close the connection after it
        bool bounded = false;  // cut the client when its queue grows over write_queue_bytes_max
        int status = 0;        // for the request log
    };
    bool send(uint64_t exchange, Send piece);
    void abandon(uint64_t exchange);  // its answer will not be complete: cuts the client
    void on_disconnect(uint64_t exchange, std::function<void()> callback);
    void after(uint64_t exchange, std::chrono::milliseconds delay, std::function<void()> task);

  private:
    enum class Phase { kHandshake, kIdle, kHeader, kBody, kAnswer, kLinger, kClosed };
    struct Outbox {
        std::mutex mutex;
        std::string pending;       // not yet handed to the socket
        size_t writing_bytes = 0;  // handed to it, not yet written
        bool flush_posted = false;
        bool writing = false;
        uint64_t exchange = 0;  // the open exchange's number; 0 = none
        bool complete = false;  // `pending` ends the answer
        bool close = false;
        bool gone = false;         // the client is, or will be in a moment
        bool peer_closed = false;  // it has said that it will send no more
        int status = 0;
        std::function<void()> disconnected;
    };

    using Step = void (HttpConnection::*)();

    void post(Step step);
    void on_handshake(IoResult result);
    void begin_request(std::chrono::milliseconds timeout);
    void start_read();
    void on_read(IoResult result, size_t bytes);
    void on_end_of_input();
    void process_input();
    bool on_header();  // false: answered already
    void start_body();
    void dispatch();
    void refuse_request(const HttpError& error, HttpHeaders headers);
    void answer_directly(int status, std::string_view content_type, const std::string& body,
                         const HttpHeaders& headers);
    uint64_t open_answer();
    void arm_read_timer(std::chrono::milliseconds delay);
    void on_read_timeout();
    void flush();
    void write_more();
    void on_written(IoResult result, size_t bytes);
    void on_answer_written();
    void linger();
    void shut();

    ConnectionHost& host_;
    const HttpServerConfig& config_;  // the host's
    const std::shared_ptr<const std::atomic<bool>> draining_;
    const size_t write_queue_bytes_max_;  // copied: send() may come when the host is gone
    std::unique_ptr<IoSocket> socket_;
    std::unique_ptr<IoTimer> read_timer_, write_timer_;
    std::vector<std::unique_ptr<IoTimer>> exchange_timers_;

    Phase phase_ = Phase::kHandshake;
    std::vector<char> read_buffer_;
    std::string input_;  // received and not yet parsed
    bool reading_ = false;
    std::optional<HttpRequestParser> parser_;
    HeaderVerdict verdict_;
    TimeNs received_ = 0, body_started_ = 0;
    uint64_t answers_ = 0;     // opened so far; the last one's number
    bool dispatched_ = false;  // the open answer is a handler's, and counted by the host
    std::string log_line_;
    std::string output_;  // being written, from output_offset_ on
    size_t output_offset_ = 0;

    Outbox outbox_;
};

}  // namespace tessera
