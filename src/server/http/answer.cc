#include "server/http/answer.h"

#include <ctime>
#include <fmt/format.h>
#include <iterator>

#include "server/http_error.h"

namespace tessera {
namespace {

void append_field(std::string& out, std::string_view name, std::string_view value) {
    out.append(name).append(": ");
    for (const char c : value) {
        out.push_back(c < ' ' && c >= 0 ? ' ' : c);
    }
    out.append("\r\n");
}

// "Sun, 06 Nov 1994 08:49:37 GMT", whatever the locale.
std::string http_date() {
    static constexpr std::string_view kDays[] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
    static constexpr std::string_view kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                                   "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
    const std::time_t now = std::time(nullptr);
    std::tm utc{};
    gmtime_r(&now, &utc);
    return fmt::format("{}, {:02} {} {} {:02}:{:02}:{:02} GMT", kDays[utc.tm_wday], utc.tm_mday,
                       kMonths[utc.tm_mon], utc.tm_year + 1900, utc.tm_hour, utc.tm_min, utc.tm_sec);
}

}  // namespace

std::string answer_head(const AnswerHead& head) {
    std::string out;
    out.reserve(512);
    fmt::format_to(std::back_inserter(out), "HTTP/1.1 {} {}\r\n", head.status, http_status_text(head.status));
    append_field(out, "Date", http_date());
    append_field(out, "Server", "tessera");
    if (!head.content_type.empty()) {
        append_field(out, "Content-Type", head.content_type);
    }
    if (!head.request_id.empty()) {
        append_field(out, "X-Request-Id", head.request_id);
    }
    append_field(out, "X-Content-Type-Options", "nosniff");
    for (const HttpHeaders* headers : {&head.headers, &head.common}) {
        for (const auto& [name, value] : *headers) {
            append_field(out, name, value);
        }
    }
    const bool bodiless = head.status == 204 || head.status == 304;
    if (head.content_length && !bodiless) {
        append_field(out, "Content-Length", std::to_string(*head.content_length));
    } else if (!head.content_length && !head.http_1_0) {
        append_field(out, "Transfer-Encoding", "chunked");
    }
    if (!head.keep_alive) {
        append_field(out, "Connection", "close");
    } else if (head.http_1_0) {
        append_field(out, "Connection", "keep-alive");
    }
    out.append("\r\n");
    return out;
}

void append_chunk(std::string& out, std::string_view piece) {
    fmt::format_to(std::back_inserter(out), "{:x}\r\n", piece.size());
    out.append(piece).append("\r\n");
}

}  // namespace tessera
