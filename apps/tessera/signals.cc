#include "signals.h"

#include <cstdlib>
#include <ctime>
#include <pthread.h>
#include <stop_token>

namespace tessera {

using std::chrono::milliseconds;

Signals::Signals() {
    sigemptyset(&set_);
    for (const int signal : {SIGTERM, SIGINT, SIGHUP}) {
        struct sigaction action{};
        if (sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) {
            sigaddset(&set_, signal);
        }
    }
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
}

int Signals::wait() const {
    int signal = 0;
    sigwait(&set_, &signal);
    return signal;
}

int Signals::wait_for(milliseconds timeout) const {
    const timespec time{.tv_sec = timeout.count() / 1000, .tv_nsec = timeout.count() % 1000 * 1'000'000};
    const int signal = sigtimedwait(&set_, nullptr, &time);
    return signal > 0 ? signal : 0;
}

Interrupts::Interrupts()
    : thread_([this](const std::stop_token& stop) {
          while (!stop.stop_requested()) {
              if (const int signal = signals_.wait_for(milliseconds(10)); signal != 0) {
                  take(signal);
              }
          }
      }) {}

void Interrupts::take(int signal) {
    const std::lock_guard lock(mutex_);
    if (!writing_ || noted_ != 0) {
        std::_Exit(128 + signal);
    }
    noted_ = signal;
}

}  // namespace tessera
