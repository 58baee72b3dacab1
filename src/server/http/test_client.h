// A plain-socket HTTP client for tests: it sends exactly the bytes that it is given, and can misbehave.
#pragma once

#include <algorithm>
#include <arpa/inet.h>
#include <cstdlib>
#include <netinet/in.h>
#include <optional>
#include <poll.h>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

namespace tessera {

struct TestAnswer {
    int status = 0;  // 0: the connection ended before a whole answer
    std::string head;
    std::string body;  // chunks joined
    bool whole = false;

    std::string field(std::string_view name) const {
        const std::string wanted = "\r\n" + std::string(name) + ": ";
        const size_t at = head.find(wanted);
        if (at == std::string::npos) {
            return "";
        }
        const size_t begin = at + wanted.size();
        return head.substr(begin, head.find("\r\n", begin) - begin);
    }
};

class TestClient {
  public:
    // Generous: a busy machine must not fail a test.
    static constexpr int kTimeoutMs = 60'000;

    explicit TestClient(int port, int receive_buffer = 0) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
        if (receive_buffer > 0) {
            setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
        }
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(static_cast<uint16_t>(port));
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        connected_ = connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    }
    ~TestClient() { close(); }
    TestClient(const TestClient&) = delete;
    TestClient& operator=(const TestClient&) = delete;

    bool connected() const { return connected_; }
    int fd() const { return fd_; }

    bool send(std::string_view bytes) {
        while (!bytes.empty()) {
            const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (n <= 0) {
                return false;
            }
            bytes.remove_prefix(static_cast<size_t>(n));
        }
        return true;
    }
    void half_close() { shutdown(fd_, SHUT_WR); }
    void close() {
        if (fd_ >= 0) {
            ::close(std::exchange(fd_, -1));
        }
    }
    // Closes with a reset instead of an orderly end.
    void reset() {
        const linger option{.l_onoff = 1, .l_linger = 0};
        setsockopt(fd_, SOL_SOCKET, SO_LINGER, &option, sizeof option);
        close();
    }

    // One more piece of input; false at the end (or the time-out).
    bool receive() {
        pollfd poll_fd{.fd = fd_, .events = POLLIN, .revents = 0};
        if (poll(&poll_fd, 1, kTimeoutMs) <= 0) {
            return false;
        }
        char buffer[4096];
        const ssize_t n = recv(fd_, buffer, sizeof buffer, 0);
        if (n <= 0) {
            return false;
        }
        input_.append(buffer, static_cast<size_t>(n));
        return true;
    }
    std::string read_to_end() {
        while (receive()) {
        }
        return std::exchange(input_, {});
    }
    // Waits for the server to close the connection with nothing (more) sent.
    bool closed_by_server() { return read_to_end().empty(); }
    std::string read_line() {
        while (input_.find("\r\n") == std::string::npos) {
            if (!receive()) {
                return std::exchange(input_, {});
            }
        }
        return take(input_.find("\r\n") + 2);
    }

    TestAnswer read_answer(bool head_only = false) {
        TestAnswer answer;
        while (input_.find("\r\n\r\n") == std::string::npos) {
            if (!receive()) {
                return answer;
            }
        }
        answer.head = take(input_.find("\r\n\r\n") + 4);
        answer.status = std::atoi(answer.head.c_str() + std::string_view("HTTP/1.1 ").size());
        if (head_only || answer.status == 100 || answer.status == 204 || answer.status == 304) {
            answer.whole = true;
        } else if (answer.field("Transfer-Encoding") == "chunked") {
            read_chunks(answer);
        } else if (const std::string length = answer.field("Content-Length"); !length.empty()) {
            const std::optional<std::string> body = read_bytes(std::stoul(length));
            answer.whole = body.has_value();
            answer.body = body.value_or("");
        } else {
            answer.body = read_to_end();
            answer.whole = true;
        }
        return answer;
    }
    TestAnswer ask(std::string_view request) {
        send(request);
        return read_answer();
    }

  private:
    std::string take(size_t bytes) {
        std::string taken = input_.substr(0, bytes);
        input_.erase(0, bytes);
        return taken;
    }
    std::optional<std::string> read_bytes(size_t bytes) {
        while (input_.size() < bytes) {
            if (!receive()) {
                return std::nullopt;
            }
        }
        return take(bytes);
    }
    void read_chunks(TestAnswer& answer) {
        while (true) {
            const std::string line = read_line();
            if (!line.ends_with("\r\n")) {
                return;
            }
            const size_t size = std::stoul(line, nullptr, 16);
            const std::optional<std::string> chunk = read_bytes(size + 2);
            if (!chunk) {
                return;
            }
            answer.body += chunk->substr(0, size);
            if (size == 0) {
                answer.whole = true;
                return;
            }
        }
    }

    int fd_ = -1;
    bool connected_ = false;
    std::string input_;
};

}  // namespace tessera
