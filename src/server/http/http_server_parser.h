// HttpRequestParser: bytes -> HttpRequest, without any input or output of its own (Beast's parser inside).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "server/http.h"
#include "server/http_error.h"

namespace tessera {

struct HttpParserLimits {
    size_t header_bytes_max = size_t{32} << 10;  // request line and fields together
    size_t body_bytes_max = size_t{8} << 20;
};

// One request; make a new parser for the next. Not thread-safe.
class HttpRequestParser {
  public:
    enum class State { kHeader, kBody, kComplete, kFailed };

    explicit HttpRequestParser(HttpParserLimits limits);
    ~HttpRequestParser();
    HttpRequestParser(HttpRequestParser&&) noexcept;
    HttpRequestParser& operator=(HttpRequestParser&&) noexcept;

    // Consumes bytes from the front and says how many; what it leaves must come again, with more behind it.
    // Stops at the end of the header (state kBody, or kComplete when there is no body), so that it can be
    // checked before the body is read, and at the end of the request: further bytes belong to the next.
    // REQUIRES: state is kHeader or kBody.
    size_t feed(std::string_view input);

    State state() const;
    const HttpError& error() const;  // when kFailed: status 400, 413, 431, 501 or 505
    // Whole when kComplete; without the body after the header. request_id and tenant are not set here.
    HttpRequest& request();
    bool http_1_0() const;
    bool keep_alive() const;        // what the client asks for
    bool expects_continue() const;  // Expect: 100-continue, and a body is to come
    std::optional<uint64_t> content_length() const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
