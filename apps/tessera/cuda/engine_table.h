// What `tessera bench engine --device cuda` prints: a table on standard error, JSON lines on standard output.
#pragma once

#include <string>

#include "engine_cost.h"
#include "idle_host.h"
#include "model/cuda/device_rates.h"
#include "step_driver.h"

namespace tessera {

struct EngineTable {
    std::string model;  // what the lines say of it
    std::string dtype;  // of weights and KV
    bool fp8 = false;   // projections
    bool fp8_kv = false;
    DeviceRates rates;
    double ready_s = 0;
    bool json = false;

    PassRates pass_rates() const;
};

struct MeasuredPass {
    bool prefill = false;
    int32_t batch = 1;
    int32_t tokens = 0;  // of the prompt, or of the context
    int32_t chunk = 0;   // prefill
    DrivenSteps steps;
    double experts_touched = 0;  // summed over the layers
    OperatorCosts costs;
};

void print_head(const EngineTable& table);
void print_pass(const EngineTable& table, const MeasuredPass& pass);
// Each operator beside its floor.
void print_operators(const EngineTable& table, const MeasuredPass& pass);
void print_idle_host(const EngineTable& table, const IdleHost& idle);

}  // namespace tessera
