// The native host's entries, for ctypes (host.py).
#include <cstring>
#include <exception>

#include "decoder.hpp"

#define TRTFORGE_API extern "C" __attribute__((visibility("default")))

using trtforge::Decoder;

// The last failure in this thread; valid until its next one.
static thread_local char failure[256];

static const char* failed(const char* what) {
    std::strncpy(failure, what, sizeof failure - 1);
    return failure;
}

// Bytes of the structs, in the order of host.py.
TRTFORGE_API void trtforge_host_sizes(int64_t sizes[4]) {
    sizes[0] = sizeof(trtforge::LinearWeights);
    sizes[1] = sizeof(trtforge::Layer);
    sizes[2] = sizeof(trtforge::Model);
    sizes[3] = sizeof(trtforge::StepInputs);
}

// nullptr if there is no memory or no thread to be had.
TRTFORGE_API Decoder* trtforge_host_open(const trtforge::Model* model, int threads) {
    try {
        return new Decoder(*model, threads);
    } catch (const std::exception& e) {
        failed(e.what());
        return nullptr;
    }
}

TRTFORGE_API void trtforge_host_close(Decoder* decoder) { delete decoder; }

TRTFORGE_API void trtforge_host_bind_pool(Decoder* decoder, int64_t group, uint8_t* rows, float* scales,
                                          int64_t num_blocks, int64_t layers) {
    decoder->bind_pool(group, rows, scales, num_blocks, layers);
}

// What went wrong, or nullptr; then *logits are the step's.
TRTFORGE_API const char* trtforge_host_run(Decoder* decoder, const trtforge::StepInputs* step, const float** logits) {
    try {
        if (const char* fault = decoder->find_fault(*step)) return fault;
        *logits = decoder->run(*step);
        return nullptr;
    } catch (const std::exception& e) {
        return failed(e.what());
    }
}

// For tests: which instruction set runs ("" for the best one); 0 if this CPU lacks it.
TRTFORGE_API int trtforge_host_force_isa(const char* name) { return trtforge::force_isa(name); }

TRTFORGE_API const char* trtforge_host_isa() { return trtforge::kernels().isa; }
