// Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

struct HttpError {
    int status = 500;
    std::string message;
    std::string type = {};   // empty: the usual one of the status (http_error_type)
    std::string param = {};  // empty: null
    std::string code = {};   // empty: null
};

// "invalid_request_error", "authentication_error", "rate_limit_error", "server_error", ...
std::string_view http_error_type(int status);
// The JSON body.
std::string http_error_body(const HttpError& error);
// "Not Found" for 404.
std::string_view http_status_text(int status);

}  // namespace tessera
