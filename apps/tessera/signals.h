// SIGINT, SIGTERM and the like as values instead of interruptions.
#pragma once

#include <atomic>
#include <chrono>
#include <csignal>
#include <mutex>
#include <thread>

namespace tessera {

// The signals that ask a process to end come to wait() alone, whatever thread they hit. Made before any other
// thread. One that the parent has set to be ignored (nohup) stays ignored.
class Signals {
  public:
    Signals();
    int wait() const;
    // The signal that comes within the time, or 0.
    int wait_for(std::chrono::milliseconds timeout) const;

  private:
    sigset_t set_;
};

// For a command that writes files: a signal ends the process at once, but while a Writing lives the first one
// is only noted, so that the writer can stop and clean up; a second ends it. Made before any other thread.
class Interrupts {
  public:
    Interrupts();
    // The signal that came while something was written, or 0.
    int noted() const { return noted_; }

    class Writing {
      public:
        explicit Writing(Interrupts& interrupts) : interrupts_(interrupts) { set(true); }
        ~Writing() { set(false); }
        Writing(const Writing&) = delete;
        Writing& operator=(const Writing&) = delete;

      private:
        void set(bool writing) {
            const std::lock_guard lock(interrupts_.mutex_);
            interrupts_.writing_ = writing;
        }
        Interrupts& interrupts_;
    };

  private:
    void take(int signal);

    const Signals signals_;
    std::mutex mutex_;
    bool writing_ = false;  // under the mutex
    std::atomic<int> noted_ = 0;
    std::jthread thread_;
};

}  // namespace tessera
