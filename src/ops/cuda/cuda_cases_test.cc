#include <fmt/format.h>
#include <gtest/gtest.h>
#include <ostream>

#include "device/cuda/device_props.h"
#include "device/cuda/stream.h"
#include "ops/cuda/cuda_registry.h"

namespace tessera {

// How GoogleTest names a parameter.
void PrintTo(const CudaOpEntry& entry, std::ostream* out) {
    *out << entry.name;
}

namespace {

constexpr int64_t kBudget = int64_t{64} << 30;

class CudaOp : public testing::TestWithParam<CudaOpEntry> {
  protected:
    void SetUp() override {
        const Result<DeviceProps> device = open_device(0);
        ASSERT_TRUE(device.ok()) << device.status().message();
    }
    void check_cases(bool large) {
        const Stream stream;
        OpError worst;
        int cases = 0;
        for (const CudaOpCase& op_case : GetParam().cases()) {
            if (op_case.bench != large) {
                continue;
            }
            MemoryBudget budget(kBudget);
            const CudaCaseRun run = op_case.prepare({budget});
            const OpError error = run.check(stream.get());
            EXPECT_EQ(error.mismatches, 0) << GetParam().name << " " << op_case.shape << " " << op_case.dtype
                                           << ": of " << error.compared << ", rms " << error.rms
                                           << ", max_abs " << error.max_abs << ", max_rel " << error.max_rel;
            worst += error;
            ++cases;
        }
        EXPECT_GT(cases, 0);
        fmt::print("{:<17} {:>3} cases {:>10} compared  rms {:.2e}  max_abs {:.2e}  max_rel {:.2e}\n",
                   GetParam().name, cases, worst.compared, worst.rms, worst.max_abs, worst.max_rel);
    }
};

TEST_P(CudaOp, SmallCases) {
    check_cases(false);
}

TEST_P(CudaOp, LargeCases) {
    check_cases(true);
}

INSTANTIATE_TEST_SUITE_P(Registry, CudaOp,
                         testing::ValuesIn(cuda_op_registry().begin(), cuda_op_registry().end()),
                         [](const auto& instance) { return std::string(instance.param.name); });

}  // namespace
}  // namespace tessera
