// The network under the HTTP server (Asio and OpenSSL inside): an event loop, byte streams over TCP or TLS,
// timers. Each socket has a strand: its callbacks and its timers' never run at the same time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tessera {

// One shot; starting it again forgets the earlier task, which is destroyed at once. On the socket's strand
// only.
class IoTimer {
  public:
    virtual ~IoTimer() = default;
    virtual void start(std::chrono::milliseconds delay, std::function<void()> task) = 0;
    virtual void cancel() = 0;
};

enum class IoResult { kOk, kEnd, kFailed };  // kEnd: the peer has sent all that it will

// One connection. Calls other than post() on its strand only; at most one read and one write at a time. The
// callback keeps alive what it captures, which must include the owner of the socket.
class IoSocket {
  public:
    using Done = std::function<void(IoResult result, size_t bytes)>;

    virtual ~IoSocket() = default;
    virtual bool tls() const = 0;
    virtual void handshake(Done done) = 0;  // TLS; at once kOk without
    virtual void read_some(char* data, size_t size, Done done) = 0;
    virtual void write_some(std::string_view data, Done done) = 0;
    // Says that no more will be written; reading goes on. The callback comes when the peer has heard it, or
    // not at all.
    virtual void shutdown_write(std::function<void()> done) = 0;
    virtual void close() = 0;  // pending callbacks get kFailed
    virtual std::unique_ptr<IoTimer> make_timer() = 0;
    // From any thread; runs later, on the strand. Forgotten when the loop has ended.
    virtual void post(std::function<void()> task) = 0;
};

struct IoLoopConfig {
    std::string host;
    int port = 0;
    std::string tls_cert_file, tls_key_file;
};

// Owns its threads; shared by its sockets, so that a socket may outlive them.
class IoLoop : public std::enable_shared_from_this<IoLoop> {
  public:
    using OnAccept = std::function<void(std::unique_ptr<IoSocket>)>;

    // Binds and listens. The error names the address, or the file, and the reason.
    static Result<std::shared_ptr<IoLoop>> create(const IoLoopConfig& config);
    virtual ~IoLoop() = default;

    virtual int port() const = 0;
    virtual std::string address() const = 0;  // as a number: "127.0.0.1", "::1"
    virtual bool loopback() const = 0;        // bound where no other machine can come from
    virtual void start(int threads, OnAccept on_accept) = 0;
    virtual void stop_accepting() = 0;
    // Waits until every socket is closed and every callback has run, and ends the threads.
    virtual void join() = 0;
    virtual bool ended() const = 0;
};

}  // namespace tessera
