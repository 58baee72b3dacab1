#include "server/http_server.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <fmt/format.h>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/bounded_queue.h"
#include "base/check.h"
#include "base/log.h"
#include "server/http/access.h"
#include "server/http/connection.h"
#include "server/http/http_server_io.h"
#include "server/http/route_table.h"

namespace tessera {
namespace {

// Connections over connections_max that are told so; beyond these they are closed without a word.
constexpr size_t kRefusedMax = 64;

// Threads that run handlers from one bounded queue.
class WorkerLane {
  public:
    WorkerLane(int threads, size_t pending_max) : queue_(pending_max) {
        for (int i = 0; i < threads; ++i) {
            threads_.emplace_back([this] { work(); });
        }
    }
    ~WorkerLane() { close(); }

    bool try_push(const HttpRoute& route, std::shared_ptr<HttpExchange> exchange) {
        return queue_.try_push({&route, std::move(exchange)});
    }
    void close() {
        queue_.close();
        for (std::thread& thread : threads_) {
            thread.join();
        }
        threads_.clear();
    }

  private:
    struct Task {
        const HttpRoute* route = nullptr;
        std::shared_ptr<HttpExchange> exchange;
    };

    void work() {
        while (std::optional<Task> task = queue_.pop()) {
            try {
                task->route->handler(std::move(task->exchange));
            } catch (const std::exception& error) {
                // Out of memory, say: this request fails (its exchange answers 500), the server goes on.
                log_error(fmt::format("a handler of {} failed: {}", task->route->path, error.what()));
            }
        }
    }

    BoundedQueue<Task> queue_;
    std::vector<std::thread> threads_;
};

}  // namespace

struct HttpServer::Impl final : ConnectionHost {
    Impl(HttpServerConfig config_in, std::shared_ptr<IoLoop> loop_in)
        : config_(std::move(config_in)),
          loop_(std::move(loop_in)),
          access_(config_, {.address = loop_->address(),
                            .port = loop_->port(),
                            .loopback = loop_->loopback(),
                            .tls = !config_.tls_cert_file.empty()}) {}

    const HttpServerConfig& config() const override { return config_; }
    const RouteTable& routes() const override { return routes_; }
    const AccessRules& access() const override { return access_; }
    std::shared_ptr<const std::atomic<bool>> draining() const override { return draining_; }

    bool dispatch(const HttpRoute& route, std::shared_ptr<HttpExchange> exchange) override {
        // Open routes (probes, the page's files) are quick, and must be answered while long prompts are
        // tokenised.
        return (route.open ? *open_lane_ : *lane_).try_push(route, std::move(exchange));
    }
    void on_exchange_opened() override {
        std::lock_guard lock(mutex_);
        ++exchanges_;
    }
    void on_exchange_closed() override {
        std::lock_guard lock(mutex_);
        --exchanges_;
        changed_.notify_all();
    }
    void on_connection_closed(HttpConnection& connection) override {
        std::lock_guard lock(mutex_);
        connections_.erase(&connection);
        changed_.notify_all();
    }

    void on_accept(std::unique_ptr<IoSocket> socket) {
        const auto connection = std::make_shared<HttpConnection>(*this, std::move(socket));
        size_t others = 0;
        {
            std::lock_guard lock(mutex_);
            others = connections_.size();
            if (closing_ || others >= config_.connections_max + kRefusedMax) {
                return;  // the socket closes with the connection
            }
            connections_.emplace(connection.get(), connection);
        }
        if (others >= config_.connections_max) {
            connection->refuse();
        } else {
            connection->start();
        }
    }

    template <typename Call>
    void for_each_connection(Call&& call) {
        std::vector<std::shared_ptr<HttpConnection>> connections;
        {
            std::lock_guard lock(mutex_);
            for (const auto& [key, connection] : connections_) {
                connections.push_back(connection);
            }
        }
        std::ranges::for_each(connections, call);
    }

    void close() {
        {
            std::lock_guard lock(mutex_);
            if (std::exchange(closing_, true)) {
                return;
            }
        }
        loop_->stop_accepting();
        for_each_connection([](const auto& connection) { connection->cut(); });
        if (lane_) {
            lane_->close();
            open_lane_->close();
        }
        // Every connection is cut, so the loop runs out of work.
        loop_->join();
    }

    const HttpServerConfig config_;
    const std::shared_ptr<IoLoop> loop_;
    const AccessRules access_;
    RouteTable routes_;
    std::shared_ptr<std::atomic<bool>> draining_ = std::make_shared<std::atomic<bool>>(false);
    std::optional<WorkerLane> lane_, open_lane_;  // set by start()

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<HttpConnection*, std::shared_ptr<HttpConnection>> connections_;
    size_t exchanges_ = 0;
    bool closing_ = false;
};

Result<std::unique_ptr<HttpServer>> HttpServer::create(HttpServerConfig config) {
    if (config.tls_cert_file.empty() != config.tls_key_file.empty()) {
        return invalid_argument("TLS needs both a certificate file and a key file");
    }
    Result<std::shared_ptr<IoLoop>> loop = IoLoop::create({.host = config.host,
                                                           .port = config.port,
                                                           .tls_cert_file = config.tls_cert_file,
                                                           .tls_key_file = config.tls_key_file});
    if (!loop.ok()) {
        return loop.status();
    }
    auto impl = std::make_unique<Impl>(std::move(config), loop.take());
    return std::make_unique<HttpServer>(std::move(impl));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() {
    close();
}

void HttpServer::add_route(HttpRoute route) {
    check(!impl_->lane_, "routes are added before start()");
    impl_->routes_.add(std::move(route));
}

void HttpServer::start() {
    Impl& impl = *impl_;
    impl.lane_.emplace(impl.config_.worker_threads, impl.config_.pending_handlers_max);
    impl.open_lane_.emplace(1, impl.config_.pending_handlers_max);
    impl.loop_->start(impl.config_.io_threads,
                      [&impl](std::unique_ptr<IoSocket> socket) { impl.on_accept(std::move(socket)); });
}

int HttpServer::port() const {
    return impl_->loop_->port();
}

std::string HttpServer::url() const {
    const HttpServerConfig& config = impl_->config_;
    const bool ipv6 = config.host.find(':') != std::string::npos;
    return fmt::format("{}://{}:{}", config.tls_cert_file.empty() ? "http" : "https",
                       ipv6 ? "[" + config.host + "]" : config.host, port());
}

HttpServerStats HttpServer::stats() const {
    std::lock_guard lock(impl_->mutex_);
    return {.connections = impl_->connections_.size(), .exchanges = impl_->exchanges_};
}

void HttpServer::drain() {
    impl_->draining_->store(true);
    impl_->for_each_connection([](const auto& connection) { connection->close_idle(); });
}

void HttpServer::stop_accepting() {
    impl_->loop_->stop_accepting();
}

bool HttpServer::wait_idle(std::chrono::milliseconds timeout) {
    std::unique_lock lock(impl_->mutex_);
    return impl_->changed_.wait_for(lock, timeout, [&] { return impl_->exchanges_ == 0; });
}

void HttpServer::close() {
    impl_->close();
}

}  // namespace tessera
