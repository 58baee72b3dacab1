// An assertion of Beast 1.81 is wrong for an empty chunked body that comes a byte at a time ("0\r\n" then
// "\r"); the code under it is right.
#define BOOST_DISABLE_ASSERTS

#include "server/http/http_server_parser.h"

#include <boost/beast/core/string.hpp>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>
#include <fmt/format.h>
#include <utility>

namespace tessera {
namespace {

namespace beast = boost::beast;
namespace http = boost::beast::http;

// A body is grown as its bytes come; a Content-Length alone reserves no more than this.
constexpr uint64_t kBodyReserveMax = uint64_t{1} << 20;

std::string lower_case(beast::string_view text) {
    std::string lower(text.data(), text.size());
    for (char& c : lower) {
        c = static_cast<char>(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c);
    }
    return lower;
}

// "/path?query", also from the absolute form "http://host/path?query".
void split_target(std::string_view target, HttpRequest& request) {
    const size_t scheme = target.find("://");
    if (!target.starts_with('/') && scheme != std::string_view::npos) {
        const size_t path = target.find_first_of("/?", scheme + 3);
        target = path == std::string_view::npos ? "/" : target.substr(path);
    }
    const size_t question = target.find('?');
    request.path = target.substr(0, question);
    if (question != std::string_view::npos) {
        request.query = target.substr(question + 1);
    }
    if (request.path.empty()) {
        request.path = "/";
    }
}

}  // namespace

// Fields go straight into an HttpRequest.
struct HttpRequestParser::Impl final : http::basic_parser<true> {
    using Error = boost::system::error_code;

    explicit Impl(HttpParserLimits limits_in) : limits(limits_in) {
        header_limit(static_cast<uint32_t>(std::min<size_t>(limits.header_bytes_max, UINT32_MAX)));
        body_limit(limits.body_bytes_max);
    }

    void on_request_impl(http::verb, beast::string_view method, beast::string_view target, int version_in,
                         Error&) override {
        request.method.assign(method.data(), method.size());
        split_target(std::string_view(target.data(), target.size()), request);
        version = version_in;
    }
    void on_response_impl(int, beast::string_view, int, Error&) override {}
    void on_field_impl(http::field field, beast::string_view name, beast::string_view value,
                       Error&) override {
        if (header_complete) {
            return;  // a trailer field: nothing that we serve reads them
        }
        if (field == http::field::host) {
            ++hosts;
        } else if (field == http::field::transfer_encoding) {
            has_transfer_encoding = true;
            only_chunked = beast::iequals(value, "chunked");
        } else if (field == http::field::expect) {
            expect = lower_case(value);
        }
        request.headers.emplace_back(lower_case(name), std::string(value.data(), value.size()));
    }
    void on_header_impl(Error&) override { header_complete = true; }
    void on_body_init_impl(const boost::optional<uint64_t>& length, Error&) override {
        request.body.reserve(std::min<uint64_t>(length.value_or(0), kBodyReserveMax));
    }
    size_t on_body_impl(beast::string_view body, Error&) override {
        request.body.append(body.data(), body.size());
        return body.size();
    }
    void on_chunk_header_impl(uint64_t, beast::string_view, Error&) override {}
    size_t on_chunk_body_impl(uint64_t, beast::string_view body, Error&) override {
        request.body.append(body.data(), body.size());
        return body.size();
    }
    void on_finish_impl(Error&) override {}

    void fail(int status, std::string message) {
        state = State::kFailed;
        error = {.status = status, .message = std::move(message)};
    }
    void fail(const Error& reason) {
        if (reason == http::error::header_limit) {
            fail_header_too_large();
        } else if (reason == http::error::body_limit) {
            fail(413, fmt::format("the request's body is larger than the limit of {} bytes",
                                  limits.body_bytes_max));
        } else if (reason == http::error::bad_version) {
            fail(505, "this server speaks HTTP/1.1 and HTTP/1.0");
        } else {
            fail(400, fmt::format("malformed HTTP request: {}", reason.message()));
        }
    }
    void fail_header_too_large() {
        fail(431, fmt::format("the request's header is larger than the limit of {} bytes",
                              limits.header_bytes_max));
    }
    // What the grammar allows and this server does not.
    void check_header() {
        if (version != 10 && version != 11) {
            fail(505, "this server speaks HTTP/1.1 and HTTP/1.0");
        } else if (header_bytes > limits.header_bytes_max) {
            fail_header_too_large();
        } else if (hosts > 1 || (hosts == 0 && version == 11)) {
            fail(400, fmt::format("an HTTP/1.1 request needs one Host header, not {}", hosts));
        } else if (has_transfer_encoding && (version == 10 || !only_chunked || !chunked())) {
            // Guessing where such a body ends would let one request hide in another.
            fail(501, "the only Transfer-Encoding that this server takes is chunked, in HTTP/1.1");
        } else {
            state = is_done() ? State::kComplete : State::kBody;
        }
    }

    HttpParserLimits limits;
    HttpRequest request;
    HttpError error;
    State state = State::kHeader;
    std::string expect;
    size_t header_bytes = 0;
    int version = 11;
    int hosts = 0;
    bool header_complete = false;
    bool has_transfer_encoding = false;
    bool only_chunked = false;
};

HttpRequestParser::HttpRequestParser(HttpParserLimits limits) : impl_(std::make_unique<Impl>(limits)) {}
HttpRequestParser::~HttpRequestParser() = default;
HttpRequestParser::HttpRequestParser(HttpRequestParser&&) noexcept = default;
HttpRequestParser& HttpRequestParser::operator=(HttpRequestParser&&) noexcept = default;

size_t HttpRequestParser::feed(std::string_view input) {
    Impl& p = *impl_;
    const bool in_header = p.state == State::kHeader;
    size_t used = 0;
    while (p.state == State::kHeader || p.state == State::kBody) {
        Impl::Error error;
        const size_t n = p.put(boost::asio::const_buffer(input.data() + used, input.size() - used), error);
        used += n;
        p.header_bytes += in_header ? n : 0;
        if (error && error != http::error::need_more) {
            p.fail(error);
        } else if (in_header && p.header_complete) {
            p.check_header();
            break;
        } else if (p.is_done()) {
            p.state = State::kComplete;
        } else if (error == http::error::need_more || used == input.size()) {
            // What waits for its end: a request line, a field, a chunk's size line or trailer. None may be
            // endless.
            if (p.header_bytes + (input.size() - used) > p.limits.header_bytes_max) {
                p.fail_header_too_large();
            }
            break;
        }
    }
    return used;
}

HttpRequestParser::State HttpRequestParser::state() const {
    return impl_->state;
}
const HttpError& HttpRequestParser::error() const {
    return impl_->error;
}
HttpRequest& HttpRequestParser::request() {
    return impl_->request;
}
bool HttpRequestParser::http_1_0() const {
    return impl_->version == 10;
}
bool HttpRequestParser::keep_alive() const {
    return (impl_->state == State::kBody || impl_->state == State::kComplete) &&
           impl_->basic_parser::keep_alive();
}
bool HttpRequestParser::expects_continue() const {
    return impl_->state == State::kBody && impl_->version == 11 && impl_->expect == "100-continue";
}
std::optional<uint64_t> HttpRequestParser::content_length() const {
    if (!impl_->header_complete) {
        return std::nullopt;
    }
    const auto length = impl_->basic_parser::content_length();
    return length ? std::optional<uint64_t>(*length) : std::nullopt;
}

}  // namespace tessera
