// The fake NVRTC: accepts only the kernel families that were compiled for the CPU together with it. Its machine code is
// the name of the family.
#include <cstring>
#include <map>
#include <vector>
#include "programs.h"
#include "operation.h"

enum {
    NVRTC_SUCCESS = 0,
    NVRTC_ERROR_INVALID_INPUT = 3,
    NVRTC_ERROR_INVALID_PROGRAM = 4,
    NVRTC_ERROR_INVALID_OPTION = 5,
    NVRTC_ERROR_COMPILATION = 6,
};

struct Program {
    std::string name, log, image;
    // Hash of the source, then of each header's name and contents.
    u64 hash;
};

// FNV-1a, as `fnv1a` of narrows-runtime.
static void mix(u64& hash, const char* text) {
    for (; *text; text++) hash = (hash ^ u8(*text)) * 0x100000001b3;
}

EXPORT int nvrtcVersion(int* major, int* minor) {
    *major = 12;
    *minor = 9;
    return NVRTC_SUCCESS;
}

EXPORT const char* nvrtcGetErrorString(int result) {
    switch (result) {
        case NVRTC_SUCCESS: return "NVRTC_SUCCESS";
        case NVRTC_ERROR_INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
        case NVRTC_ERROR_INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
        case NVRTC_ERROR_INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
        case NVRTC_ERROR_COMPILATION: return "NVRTC_ERROR_COMPILATION";
        default: return "NVRTC_ERROR unknown";
    }
}

EXPORT int nvrtcCreateProgram(Program** program, const char* text, const char* name, int headers,
                              const char* const* header_texts, const char* const* header_names) {
    if (!text || !name) return NVRTC_ERROR_INVALID_INPUT;
    u64 hash = 0xcbf29ce484222325;
    mix(hash, text);
    for (int at = 0; at < headers; at++) {
        mix(hash, header_names[at]);
        mix(hash, header_texts[at]);
    }
    *program = new Program{name, "", "", hash};
    return NVRTC_SUCCESS;
}

EXPORT int nvrtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return NVRTC_SUCCESS;
}

static int refused(Program& program, int result, const std::string& reason) {
    program.log = program.name + ": " + reason;
    return result;
}

EXPORT int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    if (!program) return NVRTC_ERROR_INVALID_PROGRAM;
    const std::string flag = "--gpu-architecture=";
    std::string architecture;
    for (int at = 0; at < count; at++) {
        const std::string option = options[at];
        if (!option.compare(0, flag.size(), flag)) architecture = option.substr(flag.size());
    }
    if (architecture.compare(0, 3, "sm_")) {
        return refused(*program, NVRTC_ERROR_INVALID_OPTION, "no --gpu-architecture=sm_…, so no cubin");
    }
    for (const auto& known : PROGRAMS) {
        if (program->name != std::string(known.name) + ".cu") continue;
        if (program->hash != known.hash) {
            return refused(*program, NVRTC_ERROR_COMPILATION,
                           "the source or a header differs from what the fake NVRTC was built from");
        }
        program->image = "\x7f" "ELF narrows fake CUDA\n" + std::string(known.name) + "\n" + architecture;
        program->image.push_back('\0');
        return NVRTC_SUCCESS;
    }
    return refused(*program, NVRTC_ERROR_COMPILATION, "the fake NVRTC has no such program");
}

EXPORT int nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
    *bytes = program->log.size() + 1;
    return NVRTC_SUCCESS;
}

EXPORT int nvrtcGetProgramLog(Program* program, char* log) {
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return NVRTC_SUCCESS;
}

EXPORT int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
    *bytes = program->image.size();
    return program->image.empty() ? NVRTC_ERROR_INVALID_PROGRAM : NVRTC_SUCCESS;
}

EXPORT int nvrtcGetCUBIN(Program* program, char* image) {
    memcpy(image, program->image.data(), program->image.size());
    return program->image.empty() ? NVRTC_ERROR_INVALID_PROGRAM : NVRTC_SUCCESS;
}
