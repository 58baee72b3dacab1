#include "device/host_buffer.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(HostBuffer, MemoryIsZeroAndAsLargeAsAskedFor) {
    const Result<HostBuffer> buffer = HostBuffer::allocate(1 << 20, "a test", "nothing");
    ASSERT_TRUE(buffer.ok());
    EXPECT_EQ(buffer->bytes(), 1 << 20);
    EXPECT_EQ(buffer->as<int32_t>()[(1 << 18) - 1], 0);
}

TEST(HostBuffer, WhatDoesNotFitIsAnErrorWithItsBytesAndAdvice) {
    const Result<HostBuffer> buffer = HostBuffer::allocate(int64_t{1} << 60, "the pool", "lower --pool");
    ASSERT_FALSE(buffer.ok());
    EXPECT_EQ(buffer.status().code(), StatusCode::kResourceExhausted);
    for (const char* part : {"the pool", "1073741824.00 GiB", "lower --pool"}) {
        EXPECT_NE(buffer.status().message().find(part), std::string::npos) << buffer.status().message();
    }
}

}  // namespace
}  // namespace tessera
