// What the operators' tests share: two threads to run on, and the loop that holds every case of an operator
// to its reference on every instruction set of this processor. For tests alone.
#pragma once

#include <gtest/gtest.h>
#include <span>

#include "ops/harness_simd.h"
#include "ops/op_case.h"

namespace tessera {

class OpTest : public ::testing::Test {
  protected:
    void TearDown() override { force_simd(0); }

    // Where `bench` is false, bench cases are left out: the reference takes seconds there, and `tessera ops
    // test` runs them.
    void expect_reference_bits(std::span<const OpCase> cases, bool bench) {
        for (const SimdVariant& variant : simd_variants()) {
            if (!variant.supported || variant.name == "reference") {
                continue;
            }
            force_simd(variant.target);
            for (const OpCase& c : cases) {
                if (c.bench && !bench) {
                    continue;
                }
                const OpError error = c.prepare().check(context_);
                EXPECT_GT(error.compared, 0) << variant.name << " " << c.shape;
                EXPECT_EQ(error.mismatches, 0)
                    << variant.name << " " << c.shape << " " << c.dtype << " max_abs=" << error.max_abs;
            }
        }
    }

    ThreadPool threads_{2};
    OpContext context_{threads_};
};

}  // namespace tessera
