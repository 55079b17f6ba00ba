// Bans the next tokens that would complete an n-gram which occurs in a source of tokens; see ngrams.py.
// A C++ compiler makes the function for CPUs of this file, nvcc (-x cu) the one for GPUs.

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define ANYWHERE __host__ __device__
#else
#define ANYWHERE
#endif

namespace {

struct Problem {
    void *scores;              // [rows, vocab], of `bytes` bytes each
    const int64_t *ids;        // [rows, length]: the tokens so far
    const int64_t *source;     // [rows / group, source_length]: the source of the banned n-grams
    int64_t scores_stride, ids_stride, source_stride;
    int64_t rows, length, source_length, group, vocab, size, bytes;
    uint64_t minus_infinity;   // its bits in the type of the scores
};

// The last token of the source's window at `start` if the row ends with the tokens before it in the window, else -1.
ANYWHERE inline int64_t completes(const Problem &p, int64_t row, int64_t start) {
    const int64_t *window = p.source + (row / p.group) * p.source_stride + start;
    const int64_t *prefix = p.ids + row * p.ids_stride + p.length - (p.size - 1);
    for (int64_t i = p.size - 2; i >= 0; i--)  // the last token differs most often
        if (window[i] != prefix[i]) return -1;
    return window[p.size - 1];
}

ANYWHERE inline void ban(const Problem &p, int64_t row, int64_t token) {
    if (token < 0 || token >= p.vocab) return;
    int64_t index = row * p.scores_stride + token;
    if (p.bytes == 8) static_cast<uint64_t *>(p.scores)[index] = p.minus_infinity;
    if (p.bytes == 4) static_cast<uint32_t *>(p.scores)[index] = static_cast<uint32_t>(p.minus_infinity);
    if (p.bytes == 2) static_cast<uint16_t *>(p.scores)[index] = static_cast<uint16_t>(p.minus_infinity);
}

#ifdef __CUDACC__
__global__ void block_repeats(Problem p) {
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x)
        for (int64_t start = threadIdx.x; start + p.size <= p.source_length; start += blockDim.x)
            ban(p, row, completes(p, row, start));
}
#else
// Few windows contain the prefix's last token in its position. Searching for that token alone, a block of windows at a
// time, is a loop without branches, which the compiler vectorises.
void block_row(const Problem &p, int64_t row) {
    constexpr int64_t kBlock = 64;
    const int64_t windows = p.source_length - p.size + 1;
    const int64_t *source = p.source + (row / p.group) * p.source_stride;
    for (int64_t first = 0; first < windows; first += kBlock) {
        const int64_t stop = first + kBlock < windows ? first + kBlock : windows;
        bool any = p.size == 1;
        if (p.size > 1) {
            const int64_t last = p.ids[row * p.ids_stride + p.length - 1];
            int64_t hits = 0;
            for (int64_t start = first; start < stop; start++) hits |= source[start + p.size - 2] == last;
            any = hits;
        }
        for (int64_t start = first; any && start < stop; start++) {
            const int64_t token = completes(p, row, start);
            if (token >= 0) ban(p, row, token);
        }
    }
}
#endif

}  // namespace

// All arguments are 64-bit integers (addresses among them) in the order of `Problem`, then the CUDA stream.
// Returns 0, or the error of the launch.
extern "C" int oslo_block_repeats(const int64_t *arguments) {
    Problem p;
    static_assert(sizeof(Problem) == 14 * sizeof(int64_t), "every member is 64 bits wide");
    std::memcpy(&p, arguments, sizeof(Problem));
    if (p.length < p.size - 1) return 0;
#ifdef __CUDACC__
    if (p.rows == 0) return 0;
    unsigned blocks = p.rows < 65535 ? static_cast<unsigned>(p.rows) : 65535;
    block_repeats<<<blocks, 256, 0, reinterpret_cast<cudaStream_t>(arguments[14])>>>(p);
    return static_cast<int>(cudaGetLastError());
#else
    for (int64_t row = 0; row < p.rows; row++) block_row(p, row);
    return 0;
#endif
}
