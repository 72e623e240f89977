// Element types the CPU kernels know. Functions here and in attention.h are static: see kernels.h on inline ones.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagemill {

enum class ElementType : int32_t { f32, bf16 };

static constexpr int64_t element_bytes(ElementType type) { return type == ElementType::f32 ? 4 : 2; }

// Tokens per tile: the unit in which keys are laid out, scored and skipped. Block sizes are multiples of it.
inline constexpr int64_t kTileTokens = 16;

}  // namespace pagemill
