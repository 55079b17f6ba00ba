// Attention of one query per row over a cache; see decode_attention.py.

#include "attention.h"

// Whether more than one thread can be used.
extern "C" int oslo_attend_threads(void) { return has_threads(); }

// softmax(scale * query key^T + added, where shown) value.
extern "C" void oslo_attend(const void* arguments) {
    attention::Attention p;
    std::memcpy(&p, arguments, sizeof p);
    attention::run(p);
}
