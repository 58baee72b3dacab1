// Whether this is a debug build: the one place that asks the preprocessor.
#pragma once

namespace tessera {

#ifdef NDEBUG
inline constexpr bool kDebugBuild = false;
#else
inline constexpr bool kDebugBuild = true;
#endif

}  // namespace tessera
