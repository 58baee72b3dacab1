// The load test's only file that knows Boost. Coroutines on one thread: a request is written as it happens.
#include "load_client.h"

#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <fmt/format.h>

namespace tessera {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using ErrorCode = boost::system::error_code;

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);
constexpr double kGetTimeoutSeconds = 30;
constexpr size_t kErrorBodyMax = 400;  // characters of a refusal that are kept

// Where an answer's body goes.
struct Answer {
    unsigned status = 0;
    std::string error;  // of the connection
    std::function<void(std::string_view)> take;
};

struct Exchange {
    const LoadTarget& target;
    const tcp::resolver::results_type& endpoints;
    http::verb verb = http::verb::get;
    std::string path;
    std::string body;
    double timeout_s = 0;
};

http::request<http::string_body> make_request(Exchange& exchange) {
    http::request<http::string_body> request(exchange.verb, exchange.target.prefix + exchange.path, 11);
    request.set(http::field::host, exchange.target.host + ":" + exchange.target.port);
    request.set(http::field::user_agent, "tessera-bench");
    request.set(http::field::connection, "close");
    if (!exchange.target.api_key.empty()) {
        request.set(http::field::authorization, "Bearer " + exchange.target.api_key);
    }
    if (exchange.verb == http::verb::post) {
        request.set(http::field::content_type, "application/json");
        request.body() = std::move(exchange.body);
        request.prepare_payload();
    }
    return request;
}

// Reads the body piece by piece as it arrives.
asio::awaitable<ErrorCode> read_answer(beast::tcp_stream& stream, Answer& answer) {
    beast::flat_buffer buffer;
    http::response_parser<http::buffer_body> parser;
    parser.body_limit(boost::none);
    auto [header_error, header_bytes] = co_await http::async_read_header(stream, buffer, parser, kAwait);
    if (header_error) {
        co_return header_error;
    }
    answer.status = parser.get().result_int();
    std::array<char, 16384> piece;
    while (!parser.is_done()) {
        parser.get().body().data = piece.data();
        parser.get().body().size = piece.size();
        auto [error, bytes] = co_await http::async_read_some(stream, buffer, parser, kAwait);
        answer.take({piece.data(), piece.size() - parser.get().body().size});
        if (error && error != http::error::need_buffer) {
            co_return error;
        }
    }
    co_return ErrorCode();
}

asio::awaitable<void> exchange(Exchange what, Answer& answer) {
    beast::tcp_stream stream(co_await asio::this_coro::executor);
    stream.expires_after(std::chrono::milliseconds(static_cast<int64_t>(what.timeout_s * 1e3)));
    auto [connect_error, endpoint] = co_await stream.async_connect(what.endpoints, kAwait);
    if (connect_error) {
        answer.error = fmt::format("cannot connect: {}", connect_error.message());
        co_return;
    }
    stream.socket().set_option(tcp::no_delay(true));
    http::request<http::string_body> request = make_request(what);
    auto [write_error, written] = co_await http::async_write(stream, request, kAwait);
    if (write_error) {
        answer.error = fmt::format("cannot send: {}", write_error.message());
        co_return;
    }
    if (const ErrorCode error = co_await read_answer(stream, answer)) {
        answer.error = error == beast::error::timeout ? fmt::format("no answer within {} s", what.timeout_s)
                                                      : fmt::format("connection lost: {}", error.message());
    }
    ErrorCode ignored;
    stream.socket().shutdown(tcp::socket::shutdown_both, ignored);
}

// The state of one run; all on the thread that runs the context.
class Load {
  public:
    explicit Load(const LoadPlan& plan) : plan_(plan), slot_free_(context_) {
        outcome_.results.resize(plan.arrivals.size());
        slot_free_.expires_at(asio::steady_timer::time_point::max());
    }

    LoadOutcome run() {
        ErrorCode error;
        endpoints_ = tcp::resolver(context_).resolve(plan_.target.host, plan_.target.port, error);
        if (error) {
            for (LoadResult& result : outcome_.results) {
                result.error = fmt::format("cannot resolve {}: {}", plan_.target.host, error.message());
            }
            return std::move(outcome_);
        }
        start_ = now_ns();
        asio::co_spawn(context_, send_all(), asio::detached);
        context_.run();
        outcome_.duration_s = seconds(now_ns() - start_);
        return std::move(outcome_);
    }

  private:
    asio::awaitable<void> send_all() {
        asio::steady_timer timer(context_);
        for (size_t i = 0; i < plan_.arrivals.size(); ++i) {
            const TimeNs wait = start_ + plan_.arrivals[i] - now_ns();
            if (wait > 0) {
                timer.expires_after(std::chrono::nanoseconds(wait));
                co_await timer.async_wait(kAwait);
            }
            while (plan_.concurrency_max > 0 && running_ >= plan_.concurrency_max) {
                co_await slot_free_.async_wait(kAwait);  // ends when a request does
            }
            ++running_;
            outcome_.concurrency_peak = std::max(outcome_.concurrency_peak, running_);
            asio::co_spawn(context_, send_one(i), asio::detached);
        }
    }

    asio::awaitable<void> send_one(size_t index) {
        LoadResult& result = outcome_.results[index];
        LoadStream stream(result);
        std::string refusal;
        Answer answer;
        answer.take = [&](std::string_view bytes) {
            if (answer.status == 200) {
                stream.feed(bytes, now_ns());
            } else {
                refusal.append(bytes.substr(0, kErrorBodyMax - std::min(kErrorBodyMax, refusal.size())));
            }
        };
        Exchange what{plan_.target, endpoints_,        http::verb::post,
                      plan_.path,   plan_.body(index), plan_.timeout_s};
        result.sent = now_ns();
        co_await exchange(std::move(what), answer);
        if (!answer.error.empty()) {
            result.error = answer.error;
        } else if (answer.status != 200) {
            result.error = fmt::format("HTTP {}: {}", answer.status, refusal);
        }
        stream.end(now_ns());
        ++done_;
        --running_;
        slot_free_.cancel();
        if (plan_.progress) {
            plan_.progress(done_, static_cast<size_t>(running_));
        }
    }

    const LoadPlan& plan_;
    asio::io_context context_{1};
    asio::steady_timer slot_free_;
    tcp::resolver::results_type endpoints_;
    LoadOutcome outcome_;
    TimeNs start_ = 0;
    int64_t running_ = 0;
    size_t done_ = 0;
};

}  // namespace

Result<LoadTarget> parse_base_url(const std::string& url) {
    constexpr std::string_view kScheme = "http://";
    if (!url.starts_with(kScheme)) {
        return invalid_argument(
            fmt::format("base URL '{}' must begin with http:// (the load test speaks no TLS)", url));
    }
    LoadTarget target;
    std::string rest = url.substr(kScheme.size());
    while (rest.ends_with('/')) {
        rest.pop_back();
    }
    if (const size_t slash = rest.find('/'); slash != std::string::npos) {
        target.prefix = rest.substr(slash);
        rest.resize(slash);
    }
    const size_t colon = rest.rfind(':');
    const bool has_port = colon != std::string::npos && rest.find(']', colon) == std::string::npos;
    target.port = has_port ? rest.substr(colon + 1) : "80";
    target.host = has_port ? rest.substr(0, colon) : rest;
    if (target.host.starts_with('[') && target.host.ends_with(']')) {
        target.host = target.host.substr(1, target.host.size() - 2);
    }
    if (target.host.empty() || target.port.empty()) {
        return invalid_argument(fmt::format("base URL '{}' must be http://HOST:PORT", url));
    }
    return target;
}

LoadOutcome run_load(const LoadPlan& plan) {
    return Load(plan).run();
}

Result<std::string> http_get(const LoadTarget& target, const std::string& path) {
    asio::io_context context(1);
    ErrorCode error;
    const auto endpoints = tcp::resolver(context).resolve(target.host, target.port, error);
    if (error) {
        return unavailable(fmt::format("cannot resolve {}: {}", target.host, error.message()));
    }
    std::string body;
    Answer answer;
    answer.take = [&](std::string_view bytes) { body.append(bytes); };
    Exchange what{target, endpoints, http::verb::get, path, {}, kGetTimeoutSeconds};
    asio::co_spawn(context, exchange(std::move(what), answer), asio::detached);
    context.run();
    const std::string where = fmt::format("http://{}:{}{}{}", target.host, target.port, target.prefix, path);
    if (!answer.error.empty()) {
        return unavailable(fmt::format("{}: {}", where, answer.error));
    }
    if (answer.status != 200) {
        return unavailable(
            fmt::format("{}: HTTP {}: {}", where, answer.status, body.substr(0, kErrorBodyMax)));
    }
    return body;
}

}  // namespace tessera
