// Products of a few rows of activations with a matrix of weights; see linear.py.

#include "linear.h"

// Whether more than one thread can be used.
extern "C" int oslo_linear_threads(void) { return has_threads(); }

// out = x w^T + bias, or x w + bias, with at least 8 columns; all tensors are dense. `a` holds x, w, bias or 0, out,
// rows, inner, outer, the kind (0, 1, 2: all tensors are float32, bfloat16, float16; 3, 4: w is bfloat16, int8, and the
// other tensors are float32), whether w is [inner, outer] (kinds 0 to 2 only), the number of threads, and the scales
// of w's rows or 0.
extern "C" void oslo_linear(const int64_t* a) {
    thread_local linear::Scratch scratch;
    const auto pointer = [&](int i) { return reinterpret_cast<void*>(a[i]); };
    linear::Product p{nullptr, pointer(1), pointer(2), pointer(3), a[4], a[5], a[6], a[6]};
    p.scale = static_cast<const float*>(pointer(10));
    const linear::Part part = linear::prepare(p, pointer(0), a[7], a[8], scratch);
    linear::run({&p, part, 1}, a[9]);
}
