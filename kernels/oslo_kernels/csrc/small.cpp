// A root-mean-square norm and rotary positions of few rows, each in one call; see small_operations.py.

#include <initializer_list>

#include "small.h"

// out = x / sqrt(mean(x^2) + eps) * (weight + offset) of dense rows.
extern "C" void oslo_rms_norm(const void* arguments) {
    small::Norm p;
    std::memcpy(&p, arguments, sizeof p);
    p.is_double ? small::norm<double>(p) : small::norm<float>(p);
}

// x * cos + rotate_half(x) * sin of queries and keys. The elements of a head after the first `turned` are copied.
extern "C" void oslo_rotate(const void* arguments) {
    small::Rotation p;
    std::memcpy(&p, arguments, sizeof p);
    for (const small::Heads* heads : {&p.query, &p.key})
        p.is_double ? small::rotate<double>(p, *heads, 0, p.batch * p.length)
                    : small::rotate<float>(p, *heads, 0, p.batch * p.length);
}
