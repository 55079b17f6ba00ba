// Interleaves the samples of several datasets; see blending.py.

#include <algorithm>
#include <cstdint>
#include <vector>

extern "C" void oslo_blend(
    int64_t datasets, int64_t size, const int64_t* shares, int64_t total, uint32_t* dataset, uint32_t* sample) {
    using wide = unsigned __int128;
    std::vector<int64_t> done(datasets, 0), deadline(datasets, 0);
    // `open` is a heap of the datasets with a released sample. The earliest deadline is on top.
    std::vector<uint32_t> next(datasets, 0), open;
    const auto later = [&](uint32_t a, uint32_t b) {
        return deadline[a] != deadline[b] ? deadline[a] > deadline[b] : a > b;
    };
    // While position k is not filled, dataset[k] heads the list of datasets released at k: 1 + the first, 0 for none.
    const auto plan = [&](uint32_t i, int64_t now) {
        const wide opens = wide(done[i]) * total / shares[i];
        if (opens >= wide(size)) return;
        deadline[i] = int64_t((wide(done[i] + 1) * total + shares[i] - 1) / shares[i]);
        if (int64_t(opens) <= now) {
            open.push_back(i);
            std::push_heap(open.begin(), open.end(), later);
        } else {
            next[i] = dataset[opens];
            dataset[opens] = i + 1;
        }
    };
    std::fill(dataset, dataset + size, 0);
    for (uint32_t i = 0; i < datasets; i++)
        if (shares[i] > 0) plan(i, 0);
    for (int64_t k = 0; k < size; k++) {
        for (uint32_t entry = dataset[k]; entry; entry = next[entry - 1]) {
            open.push_back(entry - 1);
            std::push_heap(open.begin(), open.end(), later);
        }
        std::pop_heap(open.begin(), open.end(), later);
        const uint32_t i = open.back();
        open.pop_back();
        dataset[k] = i;
        sample[k] = uint32_t(done[i]++);
        plan(i, k);
    }
}
