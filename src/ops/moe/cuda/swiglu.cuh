// SwiGLU of one output.
#pragma once

namespace tessera::cuda {

// Within 2^-21 of silu(gate) * up.
__device__ __forceinline__ float swiglu(float gate, float up) {
    constexpr float kLog2E = 1.44269504f;
    float power;
    float inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-gate * kLog2E));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return gate * inverse * up;
}

}  // namespace tessera::cuda
