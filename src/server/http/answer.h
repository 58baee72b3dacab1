// The bytes of an answer's head.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "server/http.h"

namespace tessera {

struct AnswerHead {
    int status = 200;
    std::string_view content_type;         // empty: none
    const HttpHeaders& headers;            // the handler's
    const HttpHeaders& common;             // the connection's (CORS)
    std::string_view request_id;           // empty: none
    std::optional<size_t> content_length;  // unset: chunked in HTTP/1.1, until the close in HTTP/1.0
    bool http_1_0 = false;
    bool keep_alive = true;
};

// Status line, fields and the empty line. Control characters in field values become spaces.
std::string answer_head(const AnswerHead& head);
// One chunk of a chunked answer. REQUIRES: !piece.empty(), which would end it.
void append_chunk(std::string& out, std::string_view piece);
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";

}  // namespace tessera
