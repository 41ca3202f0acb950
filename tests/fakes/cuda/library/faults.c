/* Faults on demand (the table is in README.md), sticky errors, calls in a forked child, and what is not there. */
#include "stand_in.h"
#include <stdarg.h>
#include <unistd.h>

__thread cudaError_t last_error;
__thread int current_device;
static cudaError_t sticky[MOST_DEVICES];
static pid_t pid_of_contexts;

long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? atol(value) : otherwise;
}

void trace(const char *format, ...) {
    static int on = -1;
    char line[512];
    va_list list;
    if (on < 0) on = setting("STAND_IN_CUDA_TRACE", 0) != 0;
    if (!on) return;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    fprintf(stderr, "[stand-in %d] %s\n", getpid(), line);
}

cudaError_t failed(cudaError_t error) {
    if (error) last_error = error;
    return error;
}

cudaError_t device_error(int device) { return __atomic_load_n(&sticky[device], __ATOMIC_SEQ_CST); }

void fail_device(int device, cudaError_t error, const char *why) {
    cudaError_t none = 0;
    if (__atomic_compare_exchange_n(&sticky[device], &none, error, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        fprintf(stderr, "[stand-in] device %d has failed with error %d: %s\n", device, error, why);
}

/* The driver does not survive a fork: the child has no threads, and each of its calls fails. */
cudaError_t enter(const char *call) {
    if (pid_of_contexts && pid_of_contexts != getpid()) {
        fprintf(stderr, "[stand-in] %s in a forked child\n", call);
        return failed(cudaErrorInitializationError);
    }
    pid_of_contexts = getpid();
    make_context(current_device);
    return failed(device_error(current_device));
}

cudaError_t refuse(const char *call) {
    count(REFUSED);
    fprintf(stderr, "[stand-in] %s: the stand-in does not have it\n", call);
    return failed(cudaErrorNotSupported);
}

/* STAND_IN_NCCL_FAULT is a list of RANK:WHAT, such as "1:hang-init,2:bad-sum". RANK is that of the job. */
int fault(const char *what, int rank) {
    const char *job = getenv("RANK"), *list = getenv("STAND_IN_NCCL_FAULT");
    char wanted[64];
    if (!list) return 0;
    int size = snprintf(wanted, sizeof wanted, "%d:%s", job && *job ? atoi(job) : rank, what);
    for (const char *at = list; (at = strstr(at, wanted)); at++)
        if ((at == list || at[-1] == ',') && (at[size] == ',' || !at[size])) return 1;
    return 0;
}

/* For tests: the device has met an assertion, or another error that stays. */
EXPORT void stand_in_fail(int device, int error) { fail_device(device, error, "a test asked for it"); }

EXPORT const char *cudaGetErrorName(cudaError_t error) { return error == cudaErrorAssert ? "cudaErrorAssert" : "cudaErrorOfTheStandIn"; }
EXPORT const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorNotSupported: return "operation not supported (by the stand-in)";
        case cudaErrorAssert: return "device-side assert triggered";
        case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
        case cudaErrorInitializationError: return "initialization error";
        case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
        case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        default: return "an error of the stand-in";
    }
}
EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = 0;
    return device_error(current_device) ? device_error(current_device) : error;
}
EXPORT cudaError_t cudaPeekAtLastError(void) { return device_error(current_device) ? device_error(current_device) : last_error; }
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) { *text = cudaGetErrorString((cudaError_t)error); return 0; }
EXPORT CUresult cuGetErrorName(CUresult error, const char **text) { *text = cudaGetErrorName((cudaError_t)error); return 0; }
