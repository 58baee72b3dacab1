// Times linear, moe and attention at Hy3's widths (hidden 4096, 64/8 heads of 128, 192 experts of 1536,
// vocabulary 120832) on one GPU: replays of a CUDA graph whose calls rotate over inputs larger than the
// second-level cache, median of the replays. One JSON object a line; floor_us = max(bytes / 4.27 TB/s,
// operations / 0.8 (bfloat16) or 1.5 (fp8) PFLOP/s).
#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "device/cuda/cuda_check.h"
#include "device/cuda/graph.h"
#include "device/cuda/stream.h"
#include "ops/attention/cuda/attention_cuda.h"
#include "ops/common/cuda/device_testing.h"
#include "ops/linear/cuda/linear_cuda.h"
#include "ops/moe/cuda/moe_cuda.h"

namespace tessera {
namespace {

constexpr double kBytesPerUs = 4.27e6;
constexpr int64_t kCacheBytes = int64_t{60} << 20;

__device__ uint32_t random_bits(uint64_t index) {
    uint64_t z = (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return static_cast<uint32_t>(z >> 32);
}

// Near normal, deviation about 1 (bfloat16) or 16 (e4m3).
__global__ void fill_random(uint16_t* to, int64_t count, bool fp8) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        const uint32_t bits = random_bits(static_cast<uint64_t>(i));
        const auto normal = [](uint32_t b) {
            return static_cast<float>(__popc(b) - 8) * 0.5f + static_cast<float>(b & 0xFF) / 256.0f - 0.5f;
        };
        const float low = normal(bits & 0xFFFF);
        const float high = normal(bits >> 16);
        if (fp8) {
            const auto a = __nv_cvt_float_to_fp8(low * 16, __NV_SATFINITE, __NV_E4M3);
            const auto b = __nv_cvt_float_to_fp8(high * 16, __NV_SATFINITE, __NV_E4M3);
            to[i] = static_cast<uint16_t>(a | b << 8);
        } else {
            const __nv_bfloat16 value = __float2bfloat16_rn(low);
            to[i] = *reinterpret_cast<const uint16_t*>(&value);
        }
    }
}

void* device_noise(DeviceArena& arena, int64_t count, bool fp8) {
    auto* to = arena.poisoned<uint16_t>(fp8 ? (count + 1) / 2 : count);
    fill_random<<<2048, 256>>>(to, fp8 ? (count + 1) / 2 : count, fp8);
    cuda_check(cudaDeviceSynchronize());
    return to;
}

float* constant_device(DeviceArena& arena, int64_t count, float value) {
    return arena.upload(std::vector<float>(static_cast<size_t>(count), value));
}

// Median microseconds of one call; call i of the graph gets i, for its inputs.
double time_calls(int calls, const std::function<void(cudaStream_t, int)>& call) {
    Stream stream;
    call(stream.get(), 0);
    stream.synchronize();
    const Graph graph = Graph::capture(stream.get(), [&] {
        for (int i = 0; i < calls; ++i) {
            call(stream.get(), i);
        }
    });
    graph.launch(stream.get());
    stream.synchronize();
    std::vector<double> times;
    for (int i = 0; i < 11; ++i) {
        Event begin(Event::Timing::kOn);
        Event end(Event::Timing::kOn);
        begin.record(stream.get());
        graph.launch(stream.get());
        end.record(stream.get());
        stream.synchronize();
        times.push_back(Event::elapsed_us(begin, end) / calls);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

struct Measured {
    std::string op, shape;
    bool fp8 = false;
    double us = 0;
    double bytes = 0;       // read and written at least once
    double operations = 0;  // 2 for a multiply-add
};

void report(const Measured& m) {
    const double floor = std::max(m.bytes / kBytesPerUs, m.operations / (m.fp8 ? 1.5e9 : 0.8e9));
    std::printf(
        "{\"op\":\"%s\",\"shape\":\"%s\",\"dtype\":\"%s\",\"us\":%.1f,\"floor_us\":%.1f,\"ratio\":%.2f,"
        "\"peer\":null,\"peer_us\":null}\n",
        m.op.c_str(), m.shape.c_str(), m.fp8 ? "fp8_e4m3" : "bfloat16", m.us, floor, m.us / floor);
    std::fflush(stdout);
}

struct Dense {
    const char* name;
    int64_t outputs, inputs;
    bool float_out;
    std::vector<int64_t> ranges;
    bool column_scales = false;
};

void bench_linear(const Dense& dense, bool fp8) {
    DeviceArena arena;
    const int64_t size = fp8 ? 1 : 2;
    const int64_t bytes = dense.outputs * dense.inputs * size;
    const int sets = static_cast<int>(std::max<int64_t>(2, 3 * kCacheBytes / bytes + 1));
    std::vector<uint8_t*> weights;
    for (int i = 0; i < sets; ++i) {
        weights.push_back(static_cast<uint8_t*>(device_noise(arena, dense.outputs * dense.inputs, fp8)));
    }
    LinearCuda linear(arena.poisoned<std::byte>(LinearCuda::kWorkspaceBytes), LinearCuda::kWorkspaceBytes);
    const void* x = device_noise(arena, 2048 * dense.inputs, fp8);
    const float* ones = constant_device(arena, std::max<int64_t>(dense.outputs, 2048), 1.0f);
    const int64_t out_size = dense.float_out ? 4 : 2;
    auto* y = arena.poisoned<uint8_t>(2048 * dense.outputs * out_size);
    for (const int64_t rows : {1, 16, 64, 2048}) {
        const double us = time_calls(sets * 2, [&](cudaStream_t stream, int i) {
            int64_t first = 0;
            for (const int64_t range : dense.ranges) {
                linear.run(stream,
                           {.x = x,
                            .weight = weights[static_cast<size_t>(i % sets)] + first * dense.inputs * size,
                            .y = y + first * out_size,
                            .rows = rows,
                            .inputs = dense.inputs,
                            .outputs = range,
                            .y_stride = dense.outputs,
                            .dtype = fp8 ? DType::kFloat8E4M3 : DType::kBFloat16,
                            .y_dtype = dense.float_out ? DType::kFloat32 : DType::kBFloat16,
                            .column_scale = dense.column_scales ? ones : nullptr,
                            .row_scale = dense.column_scales ? ones : nullptr});
                first += range;
            }
        });
        report({"linear", std::string(dense.name) + " M " + std::to_string(rows), fp8, us,
                static_cast<double>(bytes + rows * (dense.inputs * size + dense.outputs * out_size)),
                2.0 * static_cast<double>(rows * dense.outputs * dense.inputs)});
    }
}

void bench_moe(bool fp8) {
    constexpr int64_t kHidden = 4096, kExperts = 192, kTopK = 8, kWidth = 1536, kTokensMax = 4096;
    constexpr int kRoutings = 8;
    DeviceArena arena;
    const MoeCudaWeights weights =
        moe_cuda_bind({.dtype = fp8 ? DType::kFloat8E4M3 : DType::kBFloat16,
                       .hidden = kHidden,
                       .experts = kExperts,
                       .width = kWidth,
                       .shared_width = kWidth,
                       .gate_up = device_noise(arena, kExperts * 2 * kWidth * kHidden, fp8),
                       .down = device_noise(arena, kExperts * kWidth * kHidden, fp8),
                       .shared_gate_up = device_noise(arena, 2 * kWidth * kHidden, fp8),
                       .shared_down = device_noise(arena, kWidth * kHidden, fp8),
                       .gate_up_scale = constant_device(arena, 2 * kExperts, 0.001f),
                       .down_scale = constant_device(arena, kExperts, 0.001f),
                       .down_input_scale = constant_device(arena, kExperts, 0.01f),
                       .shared_gate_up_scale = constant_device(arena, 2, 0.001f),
                       .shared_down_scale = constant_device(arena, 1, 0.001f),
                       .shared_down_input_scale = constant_device(arena, 1, 0.01f),
                       .input_scale = 0.02f,
                       .shared_input_scale = 0.02f});
    const void* x = device_noise(arena, kTokensMax * kHidden, false);
    void* y = device_noise(arena, kTokensMax * kHidden, false);
    const float* expert_weights = constant_device(arena, kTokensMax * kTopK, 0.3f);
    auto* workspace = arena.poisoned<std::byte>(moe_cuda_workspace_bytes(weights.tensors, kTokensMax, kTopK));
    for (const int64_t tokens : {1, 8, 64, 128, 512, 1024, 4096}) {
        std::mt19937 random(static_cast<uint32_t>(tokens));
        std::vector<const int32_t*> routings;
        double experts_mean = 0;
        for (int r = 0; r < kRoutings; ++r) {
            std::vector<int32_t> chosen;
            std::vector<bool> used(kExperts);
            for (int64_t t = 0; t < tokens; ++t) {
                std::vector<int32_t> ids(kExperts);
                std::iota(ids.begin(), ids.end(), 0);
                std::shuffle(ids.begin(), ids.end(), random);
                std::sort(ids.begin(), ids.begin() + kTopK);
                for (int i = 0; i < kTopK; ++i) {
                    chosen.push_back(ids[static_cast<size_t>(i)]);
                    used[static_cast<size_t>(ids[static_cast<size_t>(i)])] = true;
                }
            }
            experts_mean += static_cast<double>(std::count(used.begin(), used.end(), true)) / kRoutings;
            routings.push_back(arena.upload(chosen));
        }
        const double us = time_calls(kRoutings, [&](cudaStream_t stream, int i) {
            moe_cuda(stream, {.weights = &weights,
                              .x = x,
                              .tokens = tokens,
                              .k = kTopK,
                              .chosen = routings[static_cast<size_t>(i % kRoutings)],
                              .expert_weights = expert_weights,
                              .y = y,
                              .workspace = workspace,
                              .sm_count = 132});
        });
        const double weight_bytes = (experts_mean + 1) * 3 * kWidth * kHidden * (fp8 ? 1 : 2);
        report({"moe", "192 x 1536 + shared T " + std::to_string(tokens), fp8, us,
                weight_bytes + 6.0 * static_cast<double>(tokens * kHidden),
                2.0 * static_cast<double>(tokens * (kTopK + 1) * 3 * kWidth * kHidden)});
    }
}

// The sequences' KV in a pool of `sets` layers of contiguous pages, to rotate over.
struct Pool {
    PagedKvCuda kv;
    int64_t layer_bytes = 0;
};

Pool make_pool(DeviceArena& arena, bool fp8, int32_t sequences, int32_t slots, int sets) {
    const int64_t layer = int64_t{2} * 8 * 64 * 128 * (fp8 ? 1 : 2);
    const int32_t pages = (slots + 63) / 64;
    std::vector<int32_t> tables(static_cast<size_t>(sequences * pages));
    std::iota(tables.begin(), tables.end(), 0);
    std::mt19937 random(1);
    std::shuffle(tables.begin(), tables.end(), random);
    Pool pool{.layer_bytes = layer};
    pool.kv = {.pool = static_cast<const std::byte*>(
                   device_noise(arena, layer * sets * sequences * pages / (fp8 ? 1 : 2), fp8)),
               .page_stride = layer * sets,
               .v_offset = layer / 2,
               .dtype = fp8 ? DType::kFloat8E4M3 : DType::kBFloat16,
               .k_scale = fp8 ? 1 / 16.0f : 1.0f,
               .v_scale = fp8 ? 1 / 16.0f : 1.0f,
               .page_tables = arena.upload(tables),
               .pages_max = pages};
    return pool;
}

PagedKvCuda layer_of(const Pool& pool, int layer) {
    PagedKvCuda kv = pool.kv;
    kv.k_offset = layer * pool.layer_bytes;
    kv.v_offset = kv.k_offset + pool.layer_bytes / 2;
    return kv;
}

void bench_decode(bool fp8, int32_t batch, int32_t slots, int32_t q_len) {
    constexpr int kSets = 3;
    const AttentionCudaShape shape{64, 8};
    DeviceArena arena;
    const Pool pool = make_pool(arena, fp8, batch, slots, kSets);
    const void* q = device_noise(arena, int64_t{batch} * q_len * 8192, false);
    void* out = arena.poisoned<uint16_t>(int64_t{batch} * q_len * 8192);
    const DecodePlanCudaArgs plan{
        .positions = arena.upload(std::vector<int32_t>(static_cast<size_t>(batch), slots - q_len)),
        .batch = batch,
        .q_len = q_len,
        .slots_max = std::max(slots, 32768),
        .workspace = arena.poisoned<std::byte>(
            decode_cuda_workspace_bytes(shape, batch, q_len, std::max(slots, 32768)))};
    decode_plan_cuda(nullptr, plan);
    cuda_check(cudaDeviceSynchronize());
    const double us = time_calls(kSets * 2, [&](cudaStream_t stream, int i) {
        attention_decode_cuda(stream, {.shape = shape,
                                       .plan = plan,
                                       .kv = layer_of(pool, i % kSets),
                                       .q = q,
                                       .q_stride = 8192,
                                       .out = out,
                                       .out_stride = 8192,
                                       .scale = 0.0883883f,
                                       .sm_count = 132});
    });
    report({"attention_decode",
            std::to_string(batch) + " x " + std::to_string(slots) + " 64/8 q_len " + std::to_string(q_len),
            fp8, us, static_cast<double>(batch) * slots * 8 * 2 * 128 * (fp8 ? 1 : 2), 0});
}

void bench_prefill(bool fp8, int32_t queries, int32_t cached) {
    constexpr int kSets = 3;
    const AttentionCudaShape shape{64, 8};
    DeviceArena arena;
    const Pool pool = make_pool(arena, fp8, 1, queries + cached, kSets);
    const void* q = device_noise(arena, int64_t{queries} * 8192, false);
    void* out = arena.poisoned<uint16_t>(int64_t{queries} * 8192);
    const PrefillPlanCudaArgs plan{
        .first_rows = arena.upload(std::vector<int32_t>{0, queries}),
        .sequences = 1,
        .rows_max = queries,
        .shape = shape,
        .workspace = arena.poisoned<std::byte>(prefill_cuda_workspace_bytes(shape, 1, queries))};
    const int32_t* positions = arena.upload(std::vector<int32_t>{cached});
    prefill_plan_cuda(nullptr, plan);
    cuda_check(cudaDeviceSynchronize());
    const double us = time_calls(kSets, [&](cudaStream_t stream, int i) {
        attention_prefill_cuda(stream, {.plan = plan,
                                        .kv = layer_of(pool, i % kSets),
                                        .positions = positions,
                                        .q = q,
                                        .q_stride = 8192,
                                        .out = out,
                                        .out_stride = 8192,
                                        .scale = 0.0883883f});
    });
    const double pairs = static_cast<double>(queries) * (cached + (queries + 1) / 2.0);
    // The products run in bfloat16 whatever the KV cache holds.
    report({std::string("attention_prefill") + (fp8 ? "_kv_fp8" : ""),
            std::to_string(queries) + " after " + std::to_string(cached) + " 64/8", false, us, 0,
            pairs * 64 * 4 * 128});
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
    using namespace tessera;
    const std::string what = argc > 1 ? argv[1] : "linear moe decode prefill";
    const auto wanted = [&what](const char* name) { return what.find(name) != std::string::npos; };
    for (const bool fp8 : {true, false}) {
        if (wanted("linear")) {
            bench_linear({"qkv [10240, 4096]", 10240, 4096, false, {10240}}, fp8);
            if (fp8) {
                bench_linear({"qkv in three ranges", 10240, 4096, false, {8192, 1024, 1024}}, fp8);
            }
            if (fp8) {
                bench_linear({"qkv with column scales", 10240, 4096, false, {10240}, true}, fp8);
            }
            bench_linear({"o [4096, 8192]", 4096, 8192, false, {4096}}, fp8);
            if (!fp8) {
                bench_linear({"lm_head [120832, 4096] to float32", 120832, 4096, true, {120832}}, fp8);
            }
        }
        if (wanted("moe")) {
            bench_moe(fp8);
        }
        if (wanted("decode")) {
            bench_decode(fp8, 64, 4096, 1);
            bench_decode(fp8, 64, 4096, 4);
            bench_decode(fp8, 1, 4096, 1);
            bench_decode(fp8, 1, 65536, 1);
        }
        if (wanted("prefill")) {
            bench_prefill(fp8, 8192, 0);
            bench_prefill(fp8, 2048, 30720);
        }
    }
    return 0;
}
