// A block of a decoder for one token per row, in two calls with the update of the cache in between; see
// decoder_block.py.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "small.h"

namespace {

struct Norm {
    const float *weight, *bias; // [width], or 0: no norm; no bias
    double eps, offset;         // the latter is added to the weight
    int64_t is_layer_norm;      // rather than by the root mean square
};

struct Linear {
    const void* weight;
    const float *bias, *scale; // or 0
    int64_t inner, outer, kind, is_inner_first;
};

enum Activation { kSiLU, kTanhGELU };

struct Block {
    Norm attention_norm, mlp_norm, query_norm, key_norm; // the last two norm heads
    Linear into[3], out, mlp_into[2], mlp_out;           // one or three to queries, keys and values; one or two (gated)
    int64_t hidden, heads, groups, width, activation, sums; // the last: whether outputs are sums over the ranks
};

using Reduce = int (*)(void* region, void* data, int64_t call);

struct Step {
    const float* x; // [rows, hidden]
    float* states;  // [rows, (heads + 2 groups) * width]: queries, keys and values
    float* part;    // [2, rows, hidden]: a sum's share of this rank, and the hidden states between attention and MLP
    float* out;     // [rows, hidden]
    const float *cos, *sin; // [rows or 1, turned]
    int64_t rows, turned, table_of_row, threads, most_per_thread;
    Reduce reduce; // or 0: the caller sums
    void* region;
    attention::Attention attention; // its result is [rows, heads, width]
};

// Returned, shifted by 32 bits, with the number of the next phase: sum `part` over the ranks first.
constexpr int64_t kSum = 1 << 29;
constexpr int64_t kFloat32 = 2; // the code of a sum's dtype

// y may be x.
void apply(const Norm& norm, const float* x, float* y, int64_t width) {
    float mean = 0, scale;
    if (norm.is_layer_norm) {
        mean = attention::sum_of(x, width) / float(width);
        for (int64_t i = 0; i < width; ++i) y[i] = x[i] - mean;
        scale = 1 / std::sqrt(small::mean_square(y, width) + float(norm.eps));
        for (int64_t i = 0; i < width; ++i) y[i] = y[i] * scale * norm.weight[i] + (norm.bias ? norm.bias[i] : 0.0f);
        return;
    }
    const float offset = float(norm.offset);
    scale = 1 / std::sqrt(small::mean_square(x, width) + float(norm.eps));
    for (int64_t i = 0; i < width; ++i) y[i] = x[i] * scale * (norm.weight[i] + offset);
}

// Products of one activation with layers of one kind, side by side in the rows of `out`.
void multiply(const Step& step, const Linear* layers, int count, const float* x, float* out, int64_t out_row, bool bias) {
    thread_local linear::Scratch scratch;
    linear::Product products[3];
    linear::Part part = nullptr;
    int64_t weights = 0;
    for (int i = 0; i < count; ++i) {
        const Linear& layer = layers[i];
        products[i] = {nullptr, layer.weight, bias ? layer.bias : nullptr, out, step.rows, layer.inner, layer.outer, out_row};
        products[i].scale = layer.scale;
        if (i == 0)
            part = linear::prepare(products[0], x, layer.kind, layer.is_inner_first, scratch);
        else
            products[i].x = products[0].x, products[i].narrowed = products[0].narrowed;
        out += layer.outer;
        weights += layer.inner * layer.outer;
    }
    const int64_t worth = 1 + weights / step.most_per_thread;
    linear::run({products, part, count}, step.threads < worth ? step.threads : worth);
}

void rotate(const Step& step, int64_t row, float* x, int64_t heads, int64_t width) {
    const float *cos = step.cos + row * step.table_of_row, *sin = step.sin + row * step.table_of_row;
    const int64_t half = step.turned / 2;
    for (int64_t head = 0; head < heads; ++head, x += width)
        for (int64_t i = 0; i < half; ++i) {
            const float a = x[i], b = x[half + i];
            x[i] = a * cos[i] - b * sin[i];
            x[half + i] = b * cos[half + i] + a * sin[half + i];
        }
}

// x / (1 + exp(-2 of)) of each, where `of` gives half of the exponent.
template <typename Half>
void times_sigmoid(float* x, int64_t count, Half half) {
    constexpr int64_t kPart = 256;
    float powers[kPart];
    for (int64_t begin = 0; begin < count; begin += kPart, x += kPart) {
        const int64_t n = count - begin < kPart ? count - begin : kPart;
        for (int64_t i = 0; i < n; ++i) powers[i] = -2 * std::fabs(half(x[i]));
        attention::exponentials(powers, n);
        for (int64_t i = 0; i < n; ++i) x[i] *= (half(x[i]) < 0 ? powers[i] : 1.0f) / (1 + powers[i]);
    }
}

void activate(int64_t activation, float* x, int64_t count) {
    if (activation == kSiLU)
        times_sigmoid(x, count, [](float v) { return 0.5f * v; });
    else
        times_sigmoid(x, count, [](float v) { return 0.7978845608f * (v + 0.044715f * v * v * v); });
}

// out = x + summed + bias.
void add(const Step& step, const Linear& layer, int64_t hidden, const float* x, float* out) {
    for (int64_t row = 0; row < step.rows; ++row)
        for (int64_t i = 0; i < hidden; ++i) {
            const int64_t at = row * hidden + i;
            out[at] = x[at] + step.part[at] + (layer.bias ? layer.bias[i] : 0.0f);
        }
}

// Sum `part` over the ranks. Return 0 when done.
int64_t sum(const Step& step, const Block& block) {
    if (!block.sums) return 0;
    if (!step.reduce || !step.region) return kSum;
    return step.reduce(step.region, step.part, step.rows * block.hidden * int64_t(sizeof(float)) << 8 | kFloat32);
}

int64_t next(int64_t phase, int64_t code) { return phase << 32 | (code & 0xffffffff); }

} // namespace

// Whether more than one thread can be used.
extern "C" int oslo_block_threads(void) { return has_threads(); }

// Write `states`: the norm, the products, norms of heads and rotary positions.
extern "C" void oslo_block_begin(const void* of_block, const void* of_step) {
    const Block& block = *static_cast<const Block*>(of_block);
    Step step;
    std::memcpy(&step, of_step, offsetof(Step, reduce)); // oslo_block_finish uses the other fields
    thread_local std::vector<float> normed;
    const int64_t hidden = block.hidden, columns = (block.heads + 2 * block.groups) * block.width;
    normed.resize(step.rows * hidden);
    for (int64_t row = 0; row < step.rows; ++row)
        apply(block.attention_norm, step.x + row * hidden, normed.data() + row * hidden, hidden);
    multiply(step, block.into, block.into[1].weight ? 3 : 1, normed.data(), step.states, columns, true);
    for (int64_t row = 0; row < step.rows; ++row) {
        float *queries = step.states + row * columns, *keys = queries + block.heads * block.width;
        if (block.query_norm.weight) {
            for (int64_t i = 0; i < block.heads; ++i)
                apply(block.query_norm, queries + i * block.width, queries + i * block.width, block.width);
            for (int64_t i = 0; i < block.groups; ++i)
                apply(block.key_norm, keys + i * block.width, keys + i * block.width, block.width);
        }
        if (step.turned) {
            rotate(step, row, queries, block.heads, block.width);
            rotate(step, row, keys, block.groups, block.width);
        }
    }
}

// Write `out`, beginning at a phase: 0 attention, 1 its output projection, 2 MLP, 3 the last residual. Return 0 when
// done. Otherwise return next phase << 32 | code, with the code returned by the sum. Call again with that phase once
// `part` is summed.
extern "C" int64_t oslo_block_finish(const void* of_block, const void* of_step, int64_t phase) {
    const Block& block = *static_cast<const Block*>(of_block);
    Step step;
    std::memcpy(&step, of_step, sizeof step);
    thread_local std::vector<float> normed, inner;
    const int64_t hidden = block.hidden;
    float* between = step.part + step.rows * hidden;
    if (phase == 0) attention::run(step.attention);
    if (phase <= 1) {
        multiply(step, &block.out, 1, static_cast<const float*>(step.attention.out), step.part, hidden, false);
        if (const int64_t code = sum(step, block)) return next(2, code);
    }
    if (phase <= 2) {
        add(step, block.out, hidden, step.x, between);
        const Linear &into = block.mlp_into[0], &gated = block.mlp_into[1];
        const int64_t columns = into.outer, all = gated.weight ? 2 * columns : columns;
        normed.resize(step.rows * hidden), inner.resize(step.rows * all);
        for (int64_t row = 0; row < step.rows; ++row)
            apply(block.mlp_norm, between + row * hidden, normed.data() + row * hidden, hidden);
        multiply(step, block.mlp_into, gated.weight ? 2 : 1, normed.data(), inner.data(), all, true);
        for (int64_t row = 0; row < step.rows; ++row) {
            float *from = inner.data() + row * all, *to = inner.data() + row * columns; // rows move together
            activate(block.activation, from, columns);
            if (gated.weight)
                for (int64_t i = 0; i < columns; ++i) to[i] = from[i] * from[columns + i];
        }
        multiply(step, &block.mlp_out, 1, inner.data(), step.part, hidden, false);
        if (const int64_t code = sum(step, block)) return next(3, code);
    }
    add(step, block.mlp_out, hidden, between, step.out);
    return 0;
}
