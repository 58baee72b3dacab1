// What a build without the CUDA backend says where a command asks for it.
#pragma once

#include "base/status.h"

namespace tessera {

inline Status without_cuda() {
    return unimplemented("--device cuda: this build of tessera has no CUDA backend; build the preset cuda");
}

}  // namespace tessera
