#include "engine_table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fmt/format.h>

#include "base/json.h"

namespace tessera {
namespace {

double tenths(double value) {
    return std::round(value * 10) / 10;
}

double tokens_per_s(const MeasuredPass& pass) {
    return (pass.prefill ? pass.tokens : pass.batch) / pass.steps.us * 1e6;
}

void print_json(const json::Value& line) {
    fmt::print("{}\n", json::dump(line));
    std::fflush(stdout);
}

json::Value operators_json(const EngineTable& table, const MeasuredPass& pass) {
    json::Value list = json::Value::array();
    for (size_t op = 0; op < kPassOperators; ++op) {
        const double floor =
            operator_floor_us(static_cast<PassOperator>(op), pass.costs[op], table.pass_rates());
        list.push_back(json::Value::object({{"op", kPassOperatorNames[op]},
                                            {"us", tenths(pass.steps.probe.operators[op])},
                                            {"floor_us", tenths(floor)}}));
    }
    return list;
}

}  // namespace

PassRates EngineTable::pass_rates() const {
    return {.bytes_per_s = std::max(rates.copy_bytes_per_s, rates.read_bytes_per_s),
            .fma_per_s = rates.bf16_flops / 2,
            .quantised_fma_per_s = (fp8 ? rates.fp8_flops : rates.bf16_flops) / 2,
            .attention_fma_per_s = (fp8_kv ? rates.fp8_flops : rates.bf16_flops) / 2};
}

void print_head(const EngineTable& table) {
    std::fprintf(stderr,
                 "%s, %s\nmeasured: copy %.2f TB/s, read %.2f TB/s, products bf16 %.0f and fp8 %.0f TFLOP/s\n"
                 "floor: the larger of bytes over the better bandwidth and operations over the products' "
                 "rate; experts: "
                 "distinct ones\ntouched, summed over the layers; gap: the longest between two steps\n\n",
                 table.model.c_str(), table.dtype.c_str(), table.rates.copy_bytes_per_s * 1e-12,
                 table.rates.read_bytes_per_s * 1e-12, table.rates.bf16_flops * 1e-12,
                 table.rates.fp8_flops * 1e-12);
    std::fprintf(stderr, "%-8s %6s %8s %6s %11s %11s %11s %9s %8s %8s\n", "phase", "batch", "tokens", "chunk",
                 "tokens/s", "us", "floor us", "x floor", "experts", "gap us");
}

void print_pass(const EngineTable& table, const MeasuredPass& pass) {
    const double floor = pass_floor_us(pass.costs, table.pass_rates());
    std::fprintf(stderr, "%-8s %6d %8d %6s %11.0f %11.1f %11.1f %9.2f %8.0f %8s\n",
                 pass.prefill ? "prefill" : "decode", pass.batch, pass.tokens,
                 pass.prefill ? std::to_string(pass.chunk).c_str() : "", tokens_per_s(pass), pass.steps.us,
                 floor, pass.steps.us / floor, pass.experts_touched,
                 pass.prefill ? "" : fmt::format("{:.1f}", pass.steps.gap_us).c_str());
    if (!table.json) {
        return;
    }
    PassCost cost;
    for (const OperatorCost& part : pass.costs) {
        cost.fmas += part.fmas;
        cost.bytes += part.bytes;
    }
    const auto when = [](bool mine, json::Value value) { return mine ? std::move(value) : json::Value(); };
    json::Value line =
        json::Value::object({{"device", "cuda"},
                             {"model", table.model},
                             {"dtype", table.dtype},
                             {"batch", pass.batch},
                             {"prompt_tokens", pass.prefill ? pass.tokens : 0},
                             {"context", pass.prefill ? 0 : pass.tokens},
                             {"chunk", when(pass.prefill, pass.chunk)},
                             {"prefill_tokens_per_s", when(pass.prefill, tenths(tokens_per_s(pass)))},
                             {"decode_tokens_per_s", when(!pass.prefill, tenths(tokens_per_s(pass)))},
                             {"step_us", tenths(pass.steps.us)},
                             {"floor_us", tenths(floor)},
                             {"ready_s", std::round(table.ready_s * 1000) / 1000},
                             {"engine", "tessera"},
                             {"experts_touched", tenths(pass.experts_touched)},
                             {"bytes", static_cast<int64_t>(cost.bytes)},
                             {"fmas", static_cast<int64_t>(cost.fmas)},
                             {"bytes_per_s", static_cast<int64_t>(table.pass_rates().bytes_per_s)},
                             {"bf16_flops", static_cast<int64_t>(table.rates.bf16_flops)},
                             {"fp8_flops", static_cast<int64_t>(table.rates.fp8_flops)}});
    if (pass.steps.probed) {
        line.set("alone_us", tenths(pass.steps.probe.step_us));
        line.set("with_events_us", tenths(pass.steps.probe.marked_us));
        line.set("operators", operators_json(table, pass));
    }
    print_json(line);
}

void print_operators(const EngineTable& table, const MeasuredPass& pass) {
    if (!pass.steps.probed) {
        return;
    }
    const StepProbe& probe = pass.steps.probe;
    double sum = 0;
    for (const double us : probe.operators) {
        sum += us;
    }
    const std::string what = pass.prefill
                                 ? fmt::format("prefill of {} in chunks of {}", pass.tokens, pass.chunk)
                                 : fmt::format("decode, batch {}, context {}", pass.batch, pass.tokens);
    std::fprintf(
        stderr,
        "\n%s: graph replay %.1f us, with an event after each operator %.1f us\n%-10s %11s %8s %11s %9s\n",
        what.c_str(), probe.step_us, probe.marked_us, "operator", "us", "share", "floor us", "x floor");
    for (size_t op = 0; op < kPassOperators; ++op) {
        const double us = probe.operators[op];
        if (us == 0) {
            continue;
        }
        const double floor =
            operator_floor_us(static_cast<PassOperator>(op), pass.costs[op], table.pass_rates());
        std::fprintf(stderr, "%-10s %11.1f %6.1f %% %11.1f %9s\n", kPassOperatorNames[op], us, us / sum * 100,
                     floor, floor > 0.05 ? fmt::format("{:.2f}", us / floor).c_str() : "");
    }
}

void print_idle_host(const EngineTable& table, const IdleHost& idle) {
    std::fprintf(
        stderr,
        "\nthrough the engine, %d requests, %d steps: the device is busy %.1f %% of the time, longest gap "
        "between steps %.1f us;\na step takes %.1f us, its launches alone %.1f us\n",
        idle.batch, idle.steps, idle.busy_share() * 100, idle.longest_gap_us, idle.step_us, idle.alone_us);
    if (table.json) {
        print_json(json::Value::object({{"device", "cuda"},
                                        {"model", table.model},
                                        {"dtype", table.dtype},
                                        {"batch", idle.batch},
                                        {"steps", idle.steps},
                                        {"busy_share", std::round(idle.busy_share() * 1e4) / 1e4},
                                        {"longest_gap_us", tenths(idle.longest_gap_us)},
                                        {"step_us", tenths(idle.step_us)},
                                        {"period_us", tenths(idle.period_us)},
                                        {"alone_us", tenths(idle.alone_us)},
                                        {"engine", "tessera"}}));
    }
}

}  // namespace tessera
