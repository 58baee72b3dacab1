// Errors as OpenAI's API states them: {"error":{"message","type","param","code"}} with an HTTP status.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "server/http.h"

namespace tessera {

struct ApiError {
    int status = 400;
    std::string message;  // names what was wrong and what would be right
    std::string type = "invalid_request_error";
    std::string param;      // the field, as a path (messages[1].content[0]); empty = null
    std::string code;       // empty = null
    int retry_after_s = 0;  // sent as Retry-After when positive
};

ApiError invalid_field(std::string param, std::string message, std::string code = {});
// How the engine's refusals and the other layers' errors look from outside.
ApiError api_error(const Status& status);

std::string error_json(const ApiError& error);
void respond_error(HttpExchange& exchange, const ApiError& error);
void respond_json(HttpExchange& exchange, std::string body);

}  // namespace tessera
