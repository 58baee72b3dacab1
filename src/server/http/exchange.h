// The HttpExchange that handlers see, over a connection.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "server/http.h"

namespace tessera {

class HttpConnection;

struct ExchangeArgs {
    std::shared_ptr<HttpConnection> connection;
    uint64_t number = 0;  // of the exchange on its connection
    HttpRequest request;
    HttpHeaders common_headers;
    bool http_1_0 = false;
    bool keep_alive = true;
    std::shared_ptr<const std::atomic<bool>> draining;  // read when the head is written
};

std::shared_ptr<HttpExchange> make_exchange(ExchangeArgs args);

}  // namespace tessera
