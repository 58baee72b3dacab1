// Workload: the random setting of one history: pool, budgets, requests.
#pragma once

#include <string>
#include <vector>

#include "sched/scheduler.h"
#include "sim/random.h"
#include "sim/script.h"

namespace tessera::sim {

struct Setting {
    SchedulerConfig scheduler;
    int32_t pages = 0;
    bool prefix_caching = true;
    int32_t requests = 0;
    bool ample = false;  // pages for all slots at once, and a budget for all their decode rows: nobody waits
                         // for either
    bool long_answers = false;   // short prompts and long answers: sequences outgrow a small pool
    bool faults = false;         // rows fail at random
    bool interruptions = false;  // cancels, finishes and deadlines
};

Setting random_setting(Random& random);

// Makes requests that share prefixes, continue earlier ones or repeat them.
class RequestMaker {
  public:
    RequestMaker(const Setting& setting, Scripts& scripts, Random& random);

    // A request that fits; its script is entered under its id.
    Request make(RequestId id, TimeNs now, const Scheduler& scheduler);

  private:
    std::vector<TokenId> prompt();
    SamplingParams sampling(Script& script);

    const Setting& setting_;
    Scripts& scripts_;
    Random& random_;
    std::vector<std::vector<TokenId>> texts_;  // shared openings
    std::vector<std::pair<Request, Script>> earlier_;
};

}  // namespace tessera::sim
