// bfloat16, computed in float32. float16 is the compiler's _Float16.

#pragma once

#include <cstdint>
#include <cstring>

struct BFloat16 {
    uint16_t bits;
    operator float() const {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
    BFloat16() = default;
    BFloat16(float value) { // to nearest, ties to even
        uint32_t wide;
        std::memcpy(&wide, &value, sizeof wide);
        bits = value != value ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    }
};
