#include "server/http/http_server_io.h"

#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <fmt/format.h>
#include <openssl/ssl.h>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/log.h"

namespace tessera {
namespace {

namespace asio = boost::asio;
namespace ssl = boost::asio::ssl;
using asio::ip::tcp;
using ErrorCode = boost::system::error_code;
using Strand = asio::strand<asio::io_context::executor_type>;
using TlsStream = ssl::stream<tcp::socket>;

// After a failed accept (no file descriptors left, say) the next try waits this long.
constexpr std::chrono::milliseconds kAcceptRetry{50};

class Timer final : public IoTimer {
  public:
    explicit Timer(const Strand& strand) : state_(std::make_shared<State>(strand)) {}
    ~Timer() override { cancel(); }

    void start(std::chrono::milliseconds delay, std::function<void()> task) override {
        State& state = *state_;
        const uint64_t round = ++state.round;
        state.task = std::move(task);
        state.timer.expires_after(delay);
        state.timer.async_wait([shared = state_, round](const ErrorCode& error) {
            // A handler that was already queued when the timer was re-armed comes here without an error.
            if (!error && round == shared->round && shared->task) {
                const std::function<void()> ready = std::exchange(shared->task, nullptr);
                ready();
            }
        });
    }
    void cancel() override {
        ++state_->round;
        state_->task = nullptr;
        state_->timer.cancel();
    }

  private:
    struct State {
        explicit State(const Strand& strand) : timer(strand) {}
        asio::steady_timer timer;
        std::function<void()> task;
        uint64_t round = 0;
    };
    std::shared_ptr<State> state_;
};

IoResult to_result(const ErrorCode& error) {
    if (!error) {
        return IoResult::kOk;
    }
    // A peer that drops a TLS connection without close_notify has ended it too.
    return error == asio::error::eof || error == ssl::error::stream_truncated ? IoResult::kEnd
                                                                              : IoResult::kFailed;
}

template <typename Stream>
class Socket final : public IoSocket {
  public:
    template <typename... StreamArgs>
    Socket(std::shared_ptr<IoLoop> loop, const Strand& strand, StreamArgs&&... stream_args)
        : loop_(std::move(loop)), strand_(strand), stream_(std::forward<StreamArgs>(stream_args)...) {
        ErrorCode ignored;
        stream_.lowest_layer().set_option(tcp::no_delay(true), ignored);
    }

    bool tls() const override { return kTls; }
    void handshake(Done done) override {
        if constexpr (kTls) {
            stream_.async_handshake(
                ssl::stream_base::server,
                [done = std::move(done)](const ErrorCode& error) { done(to_result(error), 0); });
        } else {
            done(IoResult::kOk, 0);
        }
    }
    void read_some(char* data, size_t size, Done done) override {
        stream_.async_read_some(asio::buffer(data, size),
                                [done = std::move(done)](const ErrorCode& error, size_t bytes) {
                                    done(to_result(error), bytes);
                                });
    }
    void write_some(std::string_view data, Done done) override {
        stream_.async_write_some(asio::buffer(data),
                                 [done = std::move(done)](const ErrorCode& error, size_t bytes) {
                                     done(to_result(error), bytes);
                                 });
    }
    void shutdown_write(std::function<void()> done) override {
        if constexpr (kTls) {
            // Sends close_notify; ends with the peer's, or when the owner closes the socket.
            stream_.async_shutdown([done = std::move(done)](const ErrorCode&) { done(); });
        } else {
            ErrorCode ignored;
            stream_.lowest_layer().shutdown(tcp::socket::shutdown_send, ignored);
        }
    }
    void close() override {
        ErrorCode ignored;
        stream_.lowest_layer().close(ignored);
    }
    std::unique_ptr<IoTimer> make_timer() override { return std::make_unique<Timer>(strand_); }
    void post(std::function<void()> task) override {
        // A task left in a loop that has ended would keep the socket, and the socket the loop.
        if (!loop_->ended()) {
            asio::post(strand_, std::move(task));
        }
    }

  private:
    static constexpr bool kTls = std::is_same_v<Stream, TlsStream>;

    std::shared_ptr<IoLoop> loop_;
    Strand strand_;
    Stream stream_;
};

class AsioLoop final : public IoLoop {
  public:
    Status open(const IoLoopConfig& config) {
        if (!config.tls_cert_file.empty()) {
            if (Status status = load_tls(config); !status.ok()) {
                return status;
            }
        }
        const auto failed = [&](std::string_view what, const ErrorCode& error) {
            return unavailable(
                fmt::format("cannot {} {}:{}: {}", what, config.host, config.port, error.message()));
        };
        ErrorCode error;
        tcp::resolver resolver(context_);
        const auto found = resolver.resolve(config.host, std::to_string(config.port),
                                            tcp::resolver::passive | tcp::resolver::numeric_service, error);
        if (error || found.empty()) {
            return failed("resolve the address", error);
        }
        const tcp::endpoint endpoint = found.begin()->endpoint();
        acceptor_.open(endpoint.protocol(), error);
        if (!error) {
            acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
        }
        if (!error) {
            acceptor_.bind(endpoint, error);
        }
        if (!error) {
            acceptor_.listen(asio::socket_base::max_listen_connections, error);
        }
        if (!error) {
            bound_ = acceptor_.local_endpoint(error);
        }
        return error ? failed("listen on", error) : Status();
    }

    int port() const override { return bound_.port(); }
    std::string address() const override { return bound_.address().to_string(); }
    bool loopback() const override { return bound_.address().is_loopback(); }

    void start(int threads, OnAccept on_accept) override {
        on_accept_ = std::move(on_accept);
        accept_next();
        for (int i = 0; i < threads; ++i) {
            threads_.emplace_back([this] { context_.run(); });
        }
    }
    void stop_accepting() override {
        asio::post(accept_strand_, [this] {
            ErrorCode ignored;
            acceptor_.close(ignored);
            retry_.cancel();
        });
    }
    void join() override {
        work_.reset();
        for (std::thread& thread : threads_) {
            thread.join();
        }
        threads_.clear();
        ended_ = true;
        on_accept_ = nullptr;
    }
    bool ended() const override { return ended_; }

  private:
    Status load_tls(const IoLoopConfig& config) {
        tls_.emplace(ssl::context::tls_server);
        const auto failed = [](std::string_view what, const std::string& file, const ErrorCode& error) {
            return invalid_argument(
                fmt::format("cannot read the TLS {} '{}': {}", what, file, error.message()));
        };
        ErrorCode error;
        SSL_CTX_set_min_proto_version(tls_->native_handle(), TLS1_2_VERSION);
        // An encrypted key must fail instead of asking on the terminal.
        tls_->set_password_callback([](size_t, ssl::context::password_purpose) { return std::string(); },
                                    error);
        tls_->use_certificate_chain_file(config.tls_cert_file, error);
        if (error) {
            return failed("certificate", config.tls_cert_file, error);
        }
        tls_->use_private_key_file(config.tls_key_file, ssl::context::pem, error);
        return error ? failed("key", config.tls_key_file, error) : Status();
    }

    void accept_next() {
        const Strand strand = asio::make_strand(context_);
        acceptor_.async_accept(strand, [this, strand](const ErrorCode& error, tcp::socket socket) {
            on_accepted(error, strand, std::move(socket));
        });
    }
    void on_accepted(const ErrorCode& error, const Strand& strand, tcp::socket socket) {
        if (!acceptor_.is_open()) {
            return;
        }
        if (error) {
            log_warning(fmt::format("cannot accept a connection: {}", error.message()));
            retry_.expires_after(kAcceptRetry);
            retry_.async_wait([this](const ErrorCode& cancelled) {
                if (!cancelled && acceptor_.is_open()) {
                    accept_next();
                }
            });
            return;
        }
        if (tls_) {
            on_accept_(
                std::make_unique<Socket<TlsStream>>(shared_from_this(), strand, std::move(socket), *tls_));
        } else {
            on_accept_(std::make_unique<Socket<tcp::socket>>(shared_from_this(), strand, std::move(socket)));
        }
        accept_next();
    }

    asio::io_context context_;
    asio::executor_work_guard<asio::io_context::executor_type> work_{context_.get_executor()};
    Strand accept_strand_{asio::make_strand(context_)};
    std::optional<ssl::context> tls_;
    tcp::acceptor acceptor_{accept_strand_};
    asio::steady_timer retry_{accept_strand_};
    tcp::endpoint bound_;
    OnAccept on_accept_;
    std::vector<std::thread> threads_;
    std::atomic<bool> ended_ = false;
};

}  // namespace

Result<std::shared_ptr<IoLoop>> IoLoop::create(const IoLoopConfig& config) {
    auto loop = std::make_shared<AsioLoop>();
    if (Status status = loop->open(config); !status.ok()) {
        return status;
    }
    return std::shared_ptr<IoLoop>(std::move(loop));
}

}  // namespace tessera
